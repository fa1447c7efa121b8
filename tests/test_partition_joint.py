"""partition_joint: what F returns, what B takes, and what must not happen to what is saved."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.helpers import (
    assert_split_is_exact,
    autograd,
    autograd_microbatches,
    equal,
    joint_graph,
    leaf,
    lower_module,
    run_graph,
    run_microbatches,
    tangents_for,
    targets,
)
from twobp_fx.errors import CaptureError, SplitError
from twobp_fx.passes.graph import is_random, operations, output_descriptors, outputs, placeholders
from twobp_fx.passes.partition_joint import RECOMPUTED, partition_joint

torch.set_num_threads(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), nn.Tanh())


class Sent(nn.Module):
    """The backward reads the very value that is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self.scale
        return y, y * y


class TestInterface:
    def test_names_agree_and_nothing_is_left_over(self):
        joint = joint_graph(mlp(), leaf(3, 4))
        before = joint.code
        parts = partition_joint(joint)
        assert joint.code == before
        taken = [node.name for node in placeholders(parts.backward.graph)]
        tangents = [name for name in taken if name not in parts.saved]
        assert sorted(taken) == sorted([*parts.saved, *tangents])
        assert len(tangents) == 1
        inputs = {node.name for node in placeholders(parts.forward.graph)}
        saved = [node.name for node in outputs(parts.forward.graph)][1:]
        assert saved == [name for name in parts.saved if name not in inputs]
        for graph in (parts.forward.graph, parts.backward.graph):
            assert len(outputs(graph)) == len(output_descriptors(graph))

    def test_own_inputs_are_not_returned(self):
        parts = partition_joint(joint_graph(mlp(), leaf(3, 4)))
        inputs = placeholders(parts.forward.graph)
        assert not set(outputs(parts.forward.graph)) & set(inputs)
        assert {node.name for node in inputs} & set(parts.saved)  # and yet some are saved: the stage's input at least

    def test_an_output_that_is_saved_too_has_one_name(self):
        parts = partition_joint(joint_graph(Sent(), leaf(3, 4)))
        sent, *saved = outputs(parts.forward.graph)
        assert sent.name in parts.saved
        assert sent in saved
        assert_split_is_exact(lower_module(Sent(), leaf(3, 4)))

    def test_forward_and_backward_are_those_of_the_joint(self):
        model, x, tangent = mlp(), torch.randn(3, 4), torch.randn(3, 4)
        joint = joint_graph(model, x.clone().requires_grad_())
        parts = partition_joint(joint)
        with torch.no_grad():
            arguments = [p.detach() for p in model.parameters()] + [x]
            (expected_output,), expected_gradients = joint(arguments, [tangent])
            values = dict(zip((n.name for n in placeholders(parts.forward.graph)), arguments, strict=True))
            results = run_graph(parts.forward, values)
            values |= dict(zip((n.name for n in outputs(parts.forward.graph)), results, strict=True))
            back = run_graph(parts.backward, {**values, "tangents_1": tangent})
        assert all(equal(a, b) for a, b in zip([results[0], *back], [expected_output, *expected_gradients], strict=True))

    def test_without_any_gradient(self):
        parts = partition_joint(joint_graph(mlp().requires_grad_(False), torch.randn(3, 4)))
        assert parts.saved == ()
        assert outputs(parts.backward.graph) == operations(parts.backward.graph) == []
        assert len(outputs(parts.forward.graph)) == 1


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.relu(layer(x)), 0.5)
        return x


class TestRandom:
    @pytest.mark.parametrize("budget", [1, 0.5, 0.1, 0.01, 0])
    def test_no_draw_is_repeated_under_any_memory_budget(self, budget):
        joint = joint_graph(Dropout(), leaf(64, 16))
        with functorch_config.patch(activation_memory_budget=budget):
            try:
                drawn = [n for n in operations(partition_joint(joint).backward.graph) if is_random(n)]
            except SplitError as error:
                drawn, message = [], str(error)
                refused = budget < 1 and "draw random numbers again" in message and "activation_memory_budget" in message
            else:
                refused = None
        assert drawn == []
        assert refused in (None, True)

    @pytest.mark.parametrize(("dropout", "random"), [(0.0, []), (0.5, ["_scaled_dot_product_efficient_attention.default"])])
    def test_attention_draws_only_for_its_dropout_and_never_in_the_backward(self, dropout, random):
        """Torch tags the kernels of both directions as random, whatever their dropout."""

        def attend(q: Tensor, seed: Tensor) -> object:
            out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, dropout)
            return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                out, q, q, q, None, out, logsumexp, seed, seed, dropout, [True, True, True, False]
            )

        with FakeTensorMode() as fakes:
            q, seed = (fakes.from_tensor(each) for each in (torch.ones(1, 1, 4, 8), torch.ones((), dtype=torch.int64)))
            graph = make_fx(attend)(q, seed).graph
        assert [str(node.target).removeprefix("aten.") for node in operations(graph) if is_random(node)] == random

    def test_a_draw_in_a_branch(self):
        def branch(x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x + torch.rand(4), lambda x: x.sin(), (x,))

        graph = make_fx(branch)(torch.ones(4)).graph
        assert [str(node.target) for node in operations(graph) if is_random(node)] == ["cond"]

    def test_a_draw_in_the_backward_is_refused_by_name(self):
        class Redraw(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * torch.rand_like(grad)

        class Noisy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return Redraw.apply(x)

        with pytest.raises(SplitError, match=r"draw random numbers again: rand_like.*aten\.rand_like"):
            partition_joint(joint_graph(Noisy(), leaf(3, 4)))

    def test_checkpointed_dropout(self):
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 4))

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.inner, x, use_reentrant=False).cos()

        parts = partition_joint(joint_graph(Checkpointed(), leaf(3, 4)))
        draws = [*filter(is_random, [*operations(parts.forward.graph), *operations(parts.backward.graph)])]
        assert len(draws) == 1

    @pytest.mark.parametrize("budget", [1, 0])
    def test_gradients_belong_to_the_very_draw_of_the_forward(self, budget):
        class Mask(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(64))

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = nn.functional.dropout(x * self.scale, 0.5)
                return y, (y != 0).float()

        model = Mask()
        with functorch_config.patch(activation_memory_budget=budget):
            try:
                lowered = lower_module(model, leaf(8, 64))
            except SplitError:
                assert budget < 1
                return
        (runner,) = lowered.runners()
        y, mask = lowered.output_names
        with torch.no_grad():
            sent = runner.forward(0, {})
            tangent = torch.randn(8, 64)
            runner.backward_input(0, {y: tangent})
            runner.backward_weight(0)
        x = lowered.args[0].detach()
        torch.testing.assert_close(runner.input_gradients[0]["0"], tangent * sent[mask] * 2)
        torch.testing.assert_close(runner.gradients["scale"], (tangent * sent[mask] * 2 * x).sum(0))
        assert 0.2 < sent[mask].mean() < 0.8


class Overwriting(nn.Module):
    """y = use(x * weight, copy of a buffer), and then the forward overwrites the buffer."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("buf", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.use(x * self.weight, self.buf)
        self.buf.mul_(0.5).add_(1)
        return y


USES = {
    "itself": lambda x, buf: (x[:, None] * buf.clone()).sum(1),
    "matmul": lambda x, buf: x @ buf.clone(),
    "transposed": lambda x, buf: x @ buf.clone().t(),
    "clone of transposed": lambda x, buf: x @ buf.t().clone(),
    "row": lambda x, buf: x * buf[1].clone(),
    "slice": lambda x, buf: x * buf.view(-1)[2:6].clone(),
    "expanded": lambda x, buf: x * buf.diagonal().clone().expand(3, 4),
    "twice": lambda x, buf: (x * buf[0].clone()) @ buf.clone(),
    "computed": lambda x, buf: x @ (buf + 0),
    "detached": lambda x, buf: x @ buf.detach().clone().contiguous(),
    "attention": lambda x, buf: torch.softmax(x @ buf.clone().t(), -1) @ buf.clone(),
}


class TestOverwrittenBuffers:
    """The saved value is the one before the overwriting; with several micro-batches, each has its own."""

    @pytest.mark.parametrize("budget", [1, 0])
    @pytest.mark.parametrize("name", USES)
    def test_gradients_are_of_the_value_before(self, name, budget):
        with functorch_config.patch(activation_memory_budget=budget):
            lowered = lower_module(Overwriting(USES[name]), leaf(3, 4))
        assert_split_is_exact(lowered)

    @pytest.mark.parametrize("budget", [1, 0])
    @pytest.mark.parametrize("name", USES)
    @pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
    def test_with_several_micro_batches_under_way(self, name, split, budget):
        with functorch_config.patch(activation_memory_budget=budget):
            lowered = lower_module(Overwriting(USES[name]), leaf(3, 4))
        microbatches = [(leaf(3, 4),) for _ in range(3)]
        tangents = [tangents_for(lowered, seed) for seed in range(3)]

        eager = copy.deepcopy(lowered.model)
        inputs = [args[0].detach().clone().requires_grad_() for args in microbatches]
        for x, given in zip(inputs, tangents, strict=True):
            (tangent,) = given.values()
            eager(x).backward(tangent)
        expected = {"weight": eager.weight.grad} | {f"input 0 of {i}": x.grad for i, x in enumerate(inputs)}

        torch.testing.assert_close(run_microbatches(lowered, microbatches, tangents, split=split), expected)
        torch.testing.assert_close(lowered.model.buf, eager.buf)

    def test_what_eager_refuses_is_refused(self):
        model = Overwriting(torch.matmul)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(leaf(3, 4)).sum().backward()
        with pytest.raises(CaptureError, match=r"(?s)Stage 0.*modified by an inplace operation"):
            lower_module(model, leaf(3, 4))

    @pytest.mark.parametrize("name", ["itself", "matmul", "transposed", "row", "slice", "expanded"])
    def test_a_saved_buffer_is_copied_before_it_is_overwritten(self, name):
        """The copies of the buffer are taken out of the joint graph, so that the backward reads it, or a view of it."""
        model, x, tangent = Overwriting(USES[name]), leaf(3, 4), torch.randn(3, 4)
        _, expected = autograd(model, [x], [tangent])
        joint = joint_graph(model, x)
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
        joint.recompile()

        parts = partition_joint(joint)
        with torch.no_grad():
            arguments = [model.weight.detach(), model.buf, x.detach()]
            values = dict(zip((n.name for n in placeholders(parts.forward.graph)), arguments, strict=True))
            update, _, *saved = run_graph(parts.forward, values)
            model.buf.copy_(update)
            names = [node.name for node in outputs(parts.forward.graph)[2:]]
            values |= dict(zip(names, saved, strict=True)) | {"tangents_1": tangent}
            by_weight, by_input = run_graph(parts.backward, values)
        torch.testing.assert_close({"weight": by_weight, "input 0": by_input}, expected)

    def test_batch_norm(self):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        assert_split_is_exact(lower_module(model, leaf(5, 4)))

    def test_batch_norm_in_eval_mode_writes_nothing(self):
        lowered = lower_module(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).eval(), leaf(5, 4))
        assert_split_is_exact(lowered)
        signature = lowered.program.signatures["forward"]
        assert not any(value.role == "buffer update" for value in signature.returns)

    def test_a_buffer_that_is_only_read_is_not_copied(self):
        class Reading(Overwriting):
            def forward(self, x: Tensor) -> Tensor:
                return (x * self.weight) @ self.buf

        lowered = lower_module(Reading(torch.matmul), leaf(3, 4))
        assert "aten.clone" not in targets(lowered.program.graphs.forward)
        microbatches = [(leaf(3, 4),) for _ in range(2)]
        tangents = [tangents_for(lowered, seed) for seed in range(2)]
        torch.testing.assert_close(
            run_microbatches(lowered, microbatches, tangents, split=True),
            autograd_microbatches(lowered, microbatches, tangents),
        )


class TestRecomputed:
    def test_marks_are_exactly_the_values_of_both(self):
        with functorch_config.patch(activation_memory_budget=0.1):
            parts = partition_joint(joint_graph(mlp(), leaf(64, 4)))
        computed = {node.name: node.target for node in operations(parts.forward.graph)}
        marked = {n.name: n.target for n in operations(parts.backward.graph) if n.meta.get(RECOMPUTED)}
        assert marked
        assert marked.items() <= computed.items()
        assert not any(RECOMPUTED in node.meta for node in operations(parts.forward.graph))

    def test_marks_reach_the_halves_and_the_numbers_stay(self):
        with functorch_config.patch(activation_memory_budget=0.1):
            lowered = lower_module(mlp(), leaf(64, 4))
        assert_split_is_exact(lowered, rtol=1e-4, atol=1e-5)
        graphs = lowered.program.graphs
        first, second, whole = (
            {node.name for node in operations(graph.graph) if node.meta.get(RECOMPUTED)}
            for graph in (graphs.backward_input, graphs.backward_weight, graphs.backward)
        )
        assert first | second == whole
        assert whole

    def test_a_gradient_is_not_marked(self):
        parts = partition_joint(joint_graph(nn.Linear(4, 3), leaf(2, 4)))
        assert not any(node.meta.get(RECOMPUTED) for node in operations(parts.backward.graph))
