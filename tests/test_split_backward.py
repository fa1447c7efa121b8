"""split_backward on real stages, hand-made graphs and symbolic sizes, and the runner that runs what it returns."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.helpers import (
    assert_split_is_exact,
    autograd,
    autograd_microbatches,
    backward_graph,
    equal,
    joint_graph,
    leaf,
    lower_module,
    run,
    run_graph,
    run_halves,
    run_microbatches,
    tangents_for,
    targets,
)
from twobp_fx.errors import SplitError, TwobpError
from twobp_fx.passes.aot import gradients
from twobp_fx.passes.graph import ancestors, operations, outputs, placeholders
from twobp_fx.passes.partition_joint import ForwardBackward, partition_joint
from twobp_fx.passes.split_backward import BackwardSplit, split_backward

torch.set_num_threads(1)


class Expression(nn.Module):
    """function(module, *inputs), with parameters of the given shapes."""

    def __init__(self, function: Callable[..., Any], **shapes: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def assert_each_node_in_one_half(backward: fx.GraphModule, split: BackwardSplit) -> None:
    """Every node of B that a gradient needs is in exactly one half; the halves hold nothing else."""
    needed = ancestors([value for value, _ in gradients(backward.graph)])
    wanted = sorted(node.name for node in operations(backward.graph) if node in needed)
    halves = [*operations(split.backward_input.graph), *operations(split.backward_weight.graph)]
    assert sorted(node.name for node in halves) == wanted


def assert_halves_are_the_whole(backward: fx.GraphModule, values: Mapping[str, Any]) -> BackwardSplit:
    """I then W, run on `values`, returns bitwise what B returns."""
    split = split_backward(backward)
    copies = copy.deepcopy(dict(values))
    by_input, by_weight = run_halves(split.backward_input, split.backward_weight, split.stash, values)
    of_weight = [str(of) for _, of in gradients(split.backward_weight.graph)]
    whole = [(str(of), value) for (_, of), value in zip(gradients(backward.graph), run_graph(backward, copies), strict=True)]
    assert [of for of, _ in whole if of in of_weight] == of_weight
    assert all(equal(a, b) for a, b in zip(by_weight, [v for of, v in whole if of in of_weight], strict=True))
    assert all(equal(a, b) for a, b in zip(by_input, [v for of, v in whole if of not in of_weight], strict=True))
    return split


def values_for_backward(parts: ForwardBackward, model: nn.Module, x: Tensor, tangent: Tensor) -> dict[str, Any]:
    """Run F: all that B takes, by name."""
    values: dict[str, Any] = dict(
        zip((node.name for node in placeholders(parts.forward.graph)), [*model.parameters(), x], strict=True)
    )
    names = [node.name for node in outputs(parts.forward.graph)]
    values |= dict(zip(names, run_graph(parts.forward, values), strict=True))
    return {name: values[name] for name in parts.saved} | {"tangents_1": tangent}


class TestRealStages:
    """Through the project's own capture. `assert_split_is_exact` compares I then W with B and with plain autograd."""

    def test_multiple_outputs_of_one_operator(self):
        model = nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.LayerNorm(6))
        lowered = lower_module(model, leaf(4, 6))
        assert_split_is_exact(lowered)
        weight = lowered.program.graphs.backward_weight
        assert all(isinstance(node.meta["val"], Tensor) for node in placeholders(weight.graph))
        assert "getitem" not in targets(weight)  # layer norm stays fused, in I, and is taken apart there

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: x.reshape(-1) + m.a,
            lambda m, x: (x.reshape(-1) + m.a).sin(),
            lambda m, x: x.t() @ m.a.view(3, 4) + x.select(0, 1)[:, None].expand(4, 4),
            lambda m, x: torch.cat([x.reshape(-1), m.a])[::2],
            lambda m, x: (x.chunk(2, 1)[0] * m.a.unfold(0, 2, 5).sum(0)).transpose(0, 1),
            lambda m, x: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)) * m.a[:2]),
        ],
        ids=["reshape", "reshape-sin", "expand", "cat-slice", "chunk-unfold", "complex"],
    )
    def test_views_and_aliases(self, function):
        assert_split_is_exact(lower_module(Expression(function, a=(12,)), leaf(3, 4)))

    def test_tangent_itself_is_every_gradient(self):
        lowered = lower_module(Expression(lambda m, x: x + m.a, a=(3, 4)), leaf(3, 4))
        assert_split_is_exact(lowered)
        for graph in (lowered.program.graphs.backward_input, lowered.program.graphs.backward_weight):
            assert targets(graph) == []
            (value,) = outputs(graph.graph)
            assert value.op == "placeholder"

    def test_gradient_of_an_input_and_a_parameter_at_once(self):
        lowered = lower_module(Expression(lambda m, x: (x + m.a).sin(), a=(3, 4)), leaf(3, 4))
        assert_split_is_exact(lowered)
        assert targets(lowered.program.graphs.backward_weight) == []

    def test_output_of_a_parameter_alone(self):
        assert_split_is_exact(lower_module(Expression(lambda m, x: (x * 1, m.a * 2), a=(2,)), leaf(3, 4)))

    def test_without_input_gradient_all_runs_in_weight(self):
        lowered = lower_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(3, 4))
        assert_split_is_exact(lowered)
        graphs = lowered.program.graphs
        assert targets(graphs.backward_input) == []
        assert outputs(graphs.backward_input.graph) == []
        assert targets(graphs.backward_weight) == targets(graphs.backward)

    def test_without_trainable_parameter_all_runs_in_input(self):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).requires_grad_(False)
        lowered = lower_module(model, leaf(3, 4))
        assert_split_is_exact(lowered)
        graphs = lowered.program.graphs
        assert outputs(graphs.backward_weight.graph) == []
        assert placeholders(graphs.backward_weight.graph) == []
        assert targets(graphs.backward_input) == targets(graphs.backward)

    def test_nothing_differentiable(self):
        lowered = lower_module(nn.Linear(4, 2).requires_grad_(False), torch.randn(3, 4))
        assert all(targets(graph) == [] for name, graph in lowered.program.graphs.items() if name != "forward")
        assert lowered.program.differentiable == frozenset()

    def test_frozen_parameters_in_the_middle(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        model[2].weight.requires_grad_(False)
        model[4].bias.requires_grad_(False)
        lowered = lower_module(model, leaf(2, 4))
        names = assert_split_is_exact(lowered).keys()
        assert names == {"0.weight", "0.bias", "2.bias", "4.weight", "input 0"}
        assert targets(lowered.program.graphs.backward_weight).count("aten.mm") == 2

    def test_unused_parameter_gets_none(self):
        model = Expression(lambda m, x: x @ m.a + m.c.detach().sum(), a=(4, 3), b=(2,), c=(5,))
        assert assert_split_is_exact(lower_module(model, leaf(2, 4))).keys() == {"a", "input 0"}

    def test_zero_gradient_is_not_none(self):
        model = Expression(lambda m, x: x @ m.a + m.b.sign(), a=(4, 3), b=(3,))
        assert assert_split_is_exact(lower_module(model, leaf(2, 4))).keys() == {"a", "b", "input 0"}

    def test_several_inputs_some_without_gradient(self):
        model = Expression(lambda m, x, mask, z: (x * mask) @ m.a + z, a=(4, 4))
        lowered = lower_module(model, leaf(2, 4), torch.randint(0, 2, (2, 4)), leaf(2, 4))
        assert assert_split_is_exact(lowered).keys() == {"a", "input 0", "input 2"}

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4)),
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()),
        ],
        ids=["mlp", "transformer", "conv"],
    )
    def test_every_node_in_exactly_one_half(self, model):
        lowered = lower_module(model, leaf(2, 3, 4))
        assert_split_is_exact(lowered, rtol=1e-4, atol=1e-5)
        graphs = lowered.program.graphs
        first, second, whole = (
            [node.name for node in operations(g.graph)] for g in (graphs.backward_input, graphs.backward_weight, graphs.backward)
        )
        assert sorted([*first, *second]) == sorted(whole)


class Cube(torch.autograd.Function):
    """A backward that is the derivative of the forward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.pow(3) * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * 3 * x.pow(2) * w, (grad * x.pow(3)).sum(0)


class Reversed(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def hooked(m: nn.Module, x: Tensor) -> Tensor:
    h = x @ m.a
    h.register_hook(lambda grad: grad * 3)
    return h.tanh()


class TestGradientsOfTheUsersOwn:
    """What changes a gradient behind the operators' back must be kept, or refused: never dropped in silence."""

    @staticmethod
    def check(model: nn.Module) -> None:
        try:
            lowered = lower_module(model, leaf(3, 4))
        except TwobpError:
            return
        assert_split_is_exact(lowered)

    @pytest.mark.parametrize(
        "model",
        [
            Expression(lambda m, x: Reversed.apply(x @ m.a) @ m.a, a=(4, 4)),
            Expression(lambda m, x: Cube.apply(x, m.b) @ m.a, a=(4, 4), b=(4,)),
        ],
        ids=["reversed", "cube"],
    )
    def test_custom_autograd_function(self, model):
        self.check(model)

    def test_custom_autograd_function_in_a_joint_graph_is_split(self):
        model, x, tangent = (
            Expression(lambda m, x: Reversed.apply(x @ m.a) * m.b, a=(4, 4), b=(4,)),
            leaf(3, 4),
            leaf(3, 4),
        )
        parts = partition_joint(joint_graph(model, x))
        with torch.no_grad():
            values = values_for_backward(parts, model, x.detach(), tangent.detach())
            split = assert_halves_are_the_whole(parts.backward, values)
            by_input, by_weight = run_halves(split.backward_input, split.backward_weight, split.stash, values)
        _, expected = autograd(model, [x], [tangent])
        torch.testing.assert_close(by_input, [expected["input 0"]])
        torch.testing.assert_close(by_weight, [expected["a"], expected["b"]])

    def test_tensor_hook(self):
        self.check(Expression(hooked, a=(4, 4)))

    @pytest.mark.parametrize("pre", [False, True], ids=["backward hook", "backward pre-hook"])
    def test_module_hook(self, pre):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if pre:
            model[1].register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 3,))
        else:
            model[1].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 3,))
        self.check(model)

    def test_regions_without_gradient(self):
        def function(m: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                fixed = x @ m.a
                with torch.enable_grad():
                    h = x @ m.b
            return (fixed + h).sin() @ m.c

        names = assert_split_is_exact(lower_module(Expression(function, a=(4, 4), b=(4, 4), c=(4, 2)), leaf(3, 4))).keys()
        assert names == {"b", "c", "input 0"}


class TestMissingTangents:
    """A stage whose outputs do not all get a gradient back: None for what eager leaves None, never an error."""

    @pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)])
    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: ((x + m.a).sin(), (x * m.b).cos()),  # the gradient of `a` is one that I needs too
            lambda m, x: ((x * m.a).sin(), (x * m.b).cos()),
            lambda m, x: ((x * m.a).sin(), m.b.exp()),
            lambda m, x: (x * m.a + m.b, m.b * 2),
        ],
        ids=["shared", "apart", "parameter-only", "common"],
    )
    def test_gradient_is_none_where_eager_has_none(self, function, missing):
        lowered = lower_module(Expression(function, a=(3, 4), b=(4,)), leaf(3, 4))
        tangents = {n: None if i in missing else t for i, (n, t) in enumerate(tangents_for(lowered).items())}
        assert_split_is_exact(lowered, tangents)


SUMMED = {
    "two biases, one gradient": (lambda m, x: (x + m.a + m.b).sin(), {"a": (3, 4), "b": (3, 4)}),
    "two biases, the tangent": (lambda m, x: x + m.a + m.b, {"a": (3, 4), "b": (3, 4)}),
    "two biases, views of one": (lambda m, x: (x + m.a + m.b.view(3, 4)).sin(), {"a": (3, 4), "b": (12,)}),
    "biases of rows": (lambda m, x: (x + m.a + m.b).sin(), {"a": (4,), "b": (4,)}),
    "expanded": (lambda m, x: x.sum() + m.a.sum() + m.b.sum(), {"a": (3, 4), "b": (3, 4)}),
    "parts of one": (lambda m, x: torch.cat([m.a, x, m.b]).sin(), {"a": (3, 4), "b": (3, 4)}),
    "linear": (lambda m, x: F.linear(x, m.a, m.b), {"a": (5, 4), "b": (5,)}),
}


class TestSeveralMicrobatches:
    """Sums over micro-batches, in place: none is counted twice, and nothing that was handed out changes afterwards."""

    @pytest.mark.parametrize("name", SUMMED)
    @pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
    def test_sums_are_those_of_autograd(self, name, split):
        function, shapes = SUMMED[name]
        lowered = lower_module(Expression(function, **shapes), leaf(3, 4))
        microbatches = [(leaf(3, 4),) for _ in range(3)]
        tangents = [tangents_for(lowered, seed) for seed in range(3)]
        before = copy.deepcopy(tangents)
        result = run_microbatches(lowered, microbatches, tangents, split=split)
        torch.testing.assert_close(result, autograd_microbatches(lowered, microbatches, tangents))
        torch.testing.assert_close(tangents, before, rtol=0, atol=0, msg="a tangent was written into")

    @pytest.mark.parametrize("name", SUMMED)
    @pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
    def test_every_sum_owns_its_storage(self, name, split):
        function, shapes = SUMMED[name]
        lowered = lower_module(Expression(function, **shapes), leaf(3, 4))
        _, result = run(lowered, tangents_for(lowered), split=split)
        sums = [value.untyped_storage().data_ptr() for value in result.values()]
        assert len(set(sums)) == len(sums)  # the input's gradient among them: it may still be on its way to its reader
        assert not {p.untyped_storage().data_ptr() for p in lowered.model.parameters()} & set(sums)


class TestHandMade:
    """Backward graphs made by hand, for what capture does not produce. `x...` are inputs, all else parameters."""

    def check(self, function: Callable[..., Any], values: Mapping[str, Tensor], gradients_of: Sequence[str]):
        backward = backward_graph(function, values, gradients_of)
        split = assert_halves_are_the_whole(backward, values)
        assert_each_node_in_one_half(backward, split)
        return split

    def test_multiple_outputs_and_getitem(self):
        def function(t, h):
            values, indices = (t * h).sort()
            return values + indices, values.sum(0), indices * 2.0

        split = self.check(function, {"t": torch.randn(3, 4), "h": torch.randn(3, 4)}, ["x", "w", "v"])
        assert targets(split.backward_input).count("getitem") == 2  # the tuple is taken apart where it is computed

    def test_tuple_of_which_the_input_needs_one_part_and_a_parameter_another(self):
        def function(t):
            first, second = t.chunk(2)
            return first * 2, second * 3

        split = self.check(function, {"t": torch.randn(4, 2)}, ["x", "w"])
        assert all(isinstance(node.meta["val"], Tensor) for node in placeholders(split.backward_weight.graph))

    def test_constants_in_both_halves(self):
        constant, other = torch.arange(4.0), torch.tensor([2.0])
        split = self.check(
            lambda t: (t * constant, (t + constant).sum(0) * other, other), {"t": torch.randn(3, 4)}, ["x", "w", "v"]
        )
        for half in (split.backward_input, split.backward_weight):
            assert half.graph.find_nodes(op="get_attr")
        assert split.stash == ()

    def test_views_of_one_another(self):
        def function(t, h):
            flat = (t * h).view(-1)
            return flat.view(4, 3), flat, flat[:5], flat.view(2, 6).t()

        self.check(function, {"t": torch.randn(3, 4), "h": torch.randn(3, 4)}, ["x", "w", "v", "u"])

    def test_outputs_that_are_inputs_and_outputs_repeated(self):
        def function(t, h):
            g = t * h
            return t, t, g, g, h, g

        split = self.check(function, {"t": torch.randn(3), "h": torch.randn(3)}, ["x", "w", "x1", "v", "u", "q"])
        assert split.stash == ("mul",)
        assert targets(split.backward_weight) == []

    def test_only_inputs_or_only_parameters(self):
        values = {"t": torch.randn(3, 4)}
        split = self.check(lambda t: (t * 2, t.sum()), values, ["x", "x1"])
        assert (targets(split.backward_weight), split.stash) == ([], ())
        split = self.check(lambda t: (t * 2, t.sum()), values, ["w", "v"])
        assert (targets(split.backward_input), split.stash) == ([], ())

    def test_no_gradient_at_all(self):
        split = split_backward(backward_graph(lambda t: [], {"t": torch.randn(2)}, []))
        assert outputs(split.backward_input.graph) == outputs(split.backward_weight.graph) == []

    def test_nodes_nobody_wants_run_nowhere(self):
        def function(t):
            t.exp()
            return t * 2, t + 1

        split = self.check(function, {"t": torch.randn(3)}, ["x", "w"])
        assert "aten.exp" not in targets(split.backward_input) + targets(split.backward_weight)

    def test_what_only_a_parameter_needs_stays_out_of_input(self):
        def function(t, a, w):
            g = t * a
            return g @ w, (a.t() @ g).mul(2).add(1), g.sum(0)

        values = {"t": torch.randn(3, 4), "a": torch.randn(3, 4), "w": torch.randn(4, 2)}
        split = self.check(function, values, ["x", "w1", "w2"])
        assert targets(split.backward_input) == ["aten.mul.Tensor", "aten.mm"]
        assert [node.name for node in placeholders(split.backward_weight.graph)] == ["a", "mul"]

    def test_the_backward_is_not_changed(self):
        values = {"t": torch.randn(3, 4), "h": torch.randn(3, 4)}
        backward = backward_graph(lambda t, h: (t * h, t.sum(0)), values, ["x", "w"])
        before = backward.code
        split_backward(backward)
        assert backward.code == before

    def test_write_in_place_into_a_value_of_input_alone(self):
        def function(t, h):
            g = t * h
            g.add_(1)
            return g, h.sum(0)

        values = {"t": torch.randn(3, 4), "h": torch.randn(3, 4)}
        split = self.check(function, values, ["x", "w"])
        assert "aten.add_.Tensor" in targets(split.backward_input)

    @pytest.mark.parametrize(
        "write",
        [lambda h: h.add_(1), lambda h: h.view(-1).add_(1), lambda h: h[:2].view(-1).add_(1)],
        ids=["the value", "a view of it", "a view of a view"],
    )
    def test_write_in_place_into_what_a_parameter_reads_is_refused(self, write):
        def function(t, h):
            dw = (h * 2).sum(0)
            write(h)
            return t * h, dw

        values = {"t": torch.randn(3, 4), "h": torch.randn(3, 4)}
        backward = backward_graph(function, values, ["x", "w"])
        with pytest.raises(SplitError, match=r"add_.*in place.*split_backward=False"):
            split_backward(backward)

    def test_write_in_place_into_what_a_view_of_a_parameters_reads_is_refused(self):
        def function(t, h):
            rows = h.view(-1)
            dw = rows * 2
            h.add_(1)
            return t * h, dw

        values = {"t": torch.randn(3, 4), "h": torch.randn(3, 4)}
        backward = backward_graph(function, values, ["x", "w"])
        with pytest.raises(SplitError, match=r"add_.*in place.*split_backward=False"):
            split_backward(backward)

    def test_writes_without_an_input_gradient_keep_their_order(self):
        def function(t, h):
            before = h * 2
            h.add_(t)
            return before, h * 3

        values = {"t": torch.randn(3), "h": torch.randn(3)}
        backward = backward_graph(function, values, ["w", "v"])
        split = assert_halves_are_the_whole(backward, values)
        assert targets(split.backward_weight) == targets(backward)


def test_backward_leaves_out_gradients_that_are_none():
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x * self.used + ids

    joint = joint_graph(Partial(), leaf(3, 4), torch.arange(4))
    assert any(value is None for value in outputs(joint.graph))
    backward = partition_joint(joint).backward
    assert all(value is not None for value in outputs(backward.graph))
    split = split_backward(backward)
    assert len(outputs(split.backward_input.graph)) == len(split.stash) + 1
    assert len(outputs(split.backward_weight.graph)) == 1


class Reshaping(nn.Module):
    """Sizes reach the backward both ways: as saved symbols, and computed from these."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(8, 6), nn.LayerNorm(6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.linear(x)))
        pooled = (h * self.scale).reshape(-1, 3).mean(0, keepdim=True).expand(x.shape[0], 3)
        return pooled + h.sum(1)[:, :3] / x.shape[0]


class TestSymbolicSizes:
    @staticmethod
    def joint(module: nn.Module, x: Tensor) -> fx.GraphModule:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (x.dim() - 1)]
        fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        with contextlib.ExitStack() as stack:
            return aot_export_joint_with_descriptors(stack, module, (fake,)).graph_module

    @pytest.mark.parametrize("input_gradient", [True, False])
    def test_one_graph_for_two_batch_sizes(self, input_gradient):
        model = Reshaping()
        parts = partition_joint(self.joint(model, torch.randn(5, 4, 8, requires_grad=input_gradient)))
        assert any(not isinstance(node.meta["val"], Tensor) for node in placeholders(parts.backward.graph))
        for batch in (5, 3):
            x, tangent = torch.randn(batch, 4, 8, requires_grad=input_gradient), torch.randn(batch, 3)
            with torch.no_grad():
                values = values_for_backward(parts, model, x.detach(), tangent)
                split = assert_halves_are_the_whole(parts.backward, values)
                by_input, by_weight = run_halves(split.backward_input, split.backward_weight, split.stash, values)
            assert_each_node_in_one_half(parts.backward, split)
            _, expected = autograd(model, [x], [tangent])
            names = [of.target for _, of in gradients(split.backward_weight.graph)]
            result = dict(zip(names, by_weight, strict=True))
            if input_gradient:
                (result["input 0"],) = by_input
            torch.testing.assert_close(result, expected)

    def test_sizes_that_input_computes_and_a_parameter_reads(self):
        class Sizes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8))

            def forward(self, x: Tensor) -> Tensor:
                return (x.sum() / (x.shape[0] * 3) + self.weight.sum() / (x.shape[0] * 3)).sin()

        model = Sizes()
        parts = partition_joint(self.joint(model, leaf(5, 8)))
        for batch in (5, 2):
            x, tangent = leaf(batch, 8), torch.randn(())
            with torch.no_grad():
                values = values_for_backward(parts, model, x.detach(), tangent)
                split = assert_halves_are_the_whole(parts.backward, values)
                by_input, by_weight = run_halves(split.backward_input, split.backward_weight, split.stash, values)
            _, expected = autograd(model, [x], [tangent])
            torch.testing.assert_close([*by_input, *by_weight], [expected["input 0"], expected["weight"]])


def test_what_only_input_needs_is_released_after_it():
    lowered = lower_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), leaf(3, 4))
    (runner,) = lowered.runners()
    with torch.no_grad():
        runner.forward(0, {})
        runner.backward_input(0, tangents_for(lowered))
        kept = runner.release(0)
    assert kept.keys() == {value.name for value in lowered.program.signatures["backward_weight"].takes}
    assert runner.held == 0
