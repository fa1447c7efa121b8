"""accumulate_grads: the same gradients, added into buffers on the way."""

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from examples import bert, llama, mamba, resnet
from tests.helpers import backward_graph, graph_text, lower_module, run_graph, targets
from tests.test_split_golden import BLOCKS, linear, tied_embedding
from twobp_fx.emit import Emitter
from twobp_fx.passes.accumulate_grads import accumulate_grads
from twobp_fx.passes.aot import ParamAOTInput
from twobp_fx.passes.graph import operations, output_descriptors, outputs, placeholders

torch.set_num_threads(1)


def accumulating(backward: fx.GraphModule, dtype: torch.dtype | None = None) -> fx.GraphModule:
    """The graph with buffers laid out like its parameter gradients."""
    return accumulate_grads(backward, [torch.empty_like(value.meta["val"], dtype=dtype) for value in of_parameters(backward)])


def of_parameters(backward: fx.GraphModule) -> list[fx.Node]:
    return [
        value for value, desc in zip(outputs(backward.graph), output_descriptors(backward.graph), strict=True) if is_parameter(desc)
    ]


def is_parameter(descriptor: object) -> bool:
    return descriptor is not None and isinstance(descriptor.grad_of, ParamAOTInput)


def random_values(graph: fx.GraphModule) -> dict[str, Tensor]:
    """A value for every placeholder."""
    return {node.name: _random(node.meta["val"]) for node in placeholders(graph.graph)}


def _random(like: Tensor) -> Tensor:
    value = torch.randn(like.shape) if like.is_floating_point() else torch.randint(0, 2, like.shape)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)


def assert_adds_the_gradients(
    backward: fx.GraphModule, values: dict[str, Tensor] | None = None, **tolerance: float
) -> fx.GraphModule:
    """From zeros to the gradients themselves, bitwise; from there to their double; and nothing else is different."""
    values = random_values(backward) if values is None else values
    expected = run_graph(backward, values)
    into = [is_parameter(desc) for desc in output_descriptors(backward.graph)]
    gradients = [value for value, added in zip(expected, into, strict=True) if added]
    others = [value for value, added in zip(expected, into, strict=True) if not added]
    module = accumulating(backward)
    buffers = [torch.zeros_like(gradient) for gradient in gradients]
    for times in (1, 2):
        rest = module(*(values[node.name] for node in placeholders(backward.graph)), *buffers)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            if times == 1:
                assert torch.equal(buffer, gradient)
            torch.testing.assert_close(buffer, times * gradient, **tolerance)
        assert all(torch.equal(a, b) for a, b in zip(rest, others, strict=True))
    return module


@pytest.mark.parametrize("graph", ["backward_weight", "backward"])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, graph):
    assert_adds_the_gradients(getattr(block().program.graphs, graph))


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_added_as_a_whole(block):
    """As autograd does it: bit by bit, also where the buffer holds something already."""
    backward = block().program.graphs.backward_weight
    values = random_values(backward)
    gradients = run_graph(backward, values)
    buffers = [torch.randn_like(gradient) for gradient in gradients]
    expected = [buffer + gradient for buffer, gradient in zip(buffers, gradients, strict=True)]
    likes = [torch.empty_like(value.meta["val"]) for value in of_parameters(backward)]
    accumulate_grads(backward, likes, whole=True)(*values.values(), *buffers)
    assert all(torch.equal(buffer, sum_) for buffer, sum_ in zip(buffers, expected, strict=True))


FAMILIES = {
    "bert": (bert, {"depth": 1, "width": 16}),
    "llama": (llama, {"depth": 1, "width": 16}),
    "mamba": (mamba, {"depth": 1, "width": 16}),
    "resnet": (resnet, {}),
}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, compiler):
    """With Inductor's decompositions the graphs are others."""
    builder, sizes = FAMILIES[family]
    model = builder.build(**sizes)
    args, _ = builder.example_batch(model, batch=2)
    lowered = lower_module(model, *args, emitter=Emitter(compiler))
    (runner,) = lowered.runners()
    runner.forward(0, {})
    backward = lowered.program.graphs.backward_weight
    values = random_values(backward) | runner.release(0)
    module = assert_adds_the_gradients(backward, values, rtol=1e-4, atol=1e-4)
    assert "twobp.addmm_" in targets(module)
    for node in operations(module.graph):
        if node.target is torch.ops.aten.add_.Tensor:
            assert without_views(node.args[1]).target is not torch.ops.aten.mm.default


def without_views(node: fx.Node) -> fx.Node:
    names = ("aten.view", "aten.t", "aten.permute", "aten.squeeze.dim", "aten.unsqueeze")
    while str(node.target).removesuffix(".default") in names:
        node = node.args[0]
    return node


def test_linear():
    assert_expected_inline(
        graph_text(accumulating(linear().program.graphs.backward_weight)),
        """\
%primals_3 = input(x0) : f32[2, 8]
%tangents_1 = input(d y0) : f32[2, 4]
%t_4_buffer = input() : f32[4, 8]
%view_buffer = input() : f32[4]
%view_default = aten.view(%view_buffer, [1, 4]) : f32[1, 4]
%permute_default = aten.permute(%t_4_buffer, [1, 0]) : f32[8, 4]
%permute_default_1 = aten.permute(%permute_default, [1, 0]) : f32[4, 8]
%t_2 = aten.t(%tangents_1) : f32[4, 2]
%addmm__default = twobp.addmm_(%permute_default_1, %t_2, %primals_3) : none
%sum_1 = aten.sum.dim_IntList(%tangents_1, [0], True) : f32[1, 4]
%add__tensor = aten.add_.Tensor(%view_default, %sum_1) : none
return nothing""",
    )


def test_an_embedding_that_is_the_head_too():
    assert_expected_inline(
        graph_text(accumulating(tied_embedding().program.graphs.backward_weight)),
        """\
%primals_2 = input(x0) : i64[1, 3]
%tanh = input() : f32[1, 3, 4]
%view_1 = input() : f32[3, 5]
%tanh_backward = input() : f32[1, 3, 4]
%add_1_buffer = input() : f32[5, 4]
%permute_default = aten.permute(%add_1_buffer, [1, 0]) : f32[4, 5]
%permute_default_1 = aten.permute(%permute_default, [1, 0]) : f32[5, 4]
%t_1 = aten.t(%view_1) : f32[5, 3]
%view = aten.view(%tanh, [3, 4]) : f32[3, 4]
%addmm__default = twobp.addmm_(%permute_default_1, %t_1, %view) : none
%embedding_dense_backward = aten.embedding_dense_backward(%tanh_backward, %primals_2, 5, -1, False) : f32[5, 4]
%add__tensor = aten.add_.Tensor(%add_1_buffer, %embedding_dense_backward) : none
return nothing""",
    )


def test_a_batched_product():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 5))

        def forward(self, x):
            return torch.bmm(x, self.weight)

    backward = lower_module(Experts(), torch.randn(3, 2, 4, requires_grad=True)).program.graphs.backward_weight
    module = assert_adds_the_gradients(backward)
    assert "twobp.baddbmm_" in targets(module)
    assert "aten.bmm" not in targets(module)


def test_what_somebody_else_reads_is_computed_as_before():
    backward = backward_graph(
        lambda t, a: (torch.mm(t, a), torch.mm(t, a).sin()), {"t": torch.randn(3, 3), "a": torch.randn(3, 3)}, ["weight", "x"]
    )
    twice = backward_graph(
        lambda t, a: (one := torch.mm(t, a), one, one.sin()), {"t": torch.randn(3, 3), "a": torch.randn(3, 3)}, ["v", "w", "x"]
    )
    assert_adds_the_gradients(backward)
    module = assert_adds_the_gradients(twice)
    assert targets(module).count("aten.mm") == 1


def test_a_gradient_that_is_an_input_of_the_graph():
    backward = backward_graph(lambda t: (t, t), {"t": torch.randn(3)}, ["weight", "x"])
    assert_adds_the_gradients(backward)


def test_a_gradient_that_is_a_constant():
    backward = backward_graph(lambda: (torch.full((3,), 2.0),), {}, ["weight"])
    assert_adds_the_gradients(backward)


def test_a_buffer_whose_strides_no_view_fits():
    """A product of `(6, 4)` seen as `(2, 3, 4)`: the buffer's first two dimensions are no longer one."""
    backward = backward_graph(
        lambda t, a: (torch.mm(t, a).view(2, 3, 4),), {"t": torch.randn(6, 2), "a": torch.randn(2, 4)}, ["weight"]
    )
    values = random_values(backward)
    (like,) = (value.meta["val"] for value in of_parameters(backward))
    module = accumulate_grads(backward, [like.new_empty_strided((2, 3, 4), (4, 8, 1))])
    buffer = torch.zeros(3, 2, 4).transpose(0, 1)
    module(*values.values(), buffer)
    assert torch.equal(buffer, run_graph(backward, values)[0])


def test_gradients_in_half_precision_are_added_in_that_of_the_buffer():
    model, x = nn.Linear(8, 4).bfloat16(), torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    backward = lower_module(model, x).program.graphs.backward_weight
    values = random_values(backward)
    expected = run_graph(backward, values)
    module = accumulating(backward, torch.float32)
    buffers = [torch.full(gradient.shape, 1e-4) for gradient in expected]
    for _ in range(3):
        module(*values.values(), *buffers)
    for buffer, gradient in zip(buffers, expected, strict=True):
        assert buffer.dtype is torch.float32
        torch.testing.assert_close(buffer, 1e-4 + 3 * gradient.float())


def test_a_gradient_without_a_buffer_is_returned():
    backward = linear().program.graphs.backward_weight
    values = random_values(backward)
    weight, bias = run_graph(backward, values)
    module = accumulate_grads(backward, [None, of_parameters(backward)[1].meta["val"]])
    buffer = torch.zeros_like(bias)
    assert torch.equal(*module(*values.values(), buffer), weight)
    assert torch.equal(buffer, bias)
    assert [desc.grad_of.target for desc in output_descriptors(module.graph)] == ["p_model_weight"]


def test_the_graph_given_stays_as_it_was():
    backward = linear().program.graphs.backward_weight
    before = graph_text(backward)
    accumulating(backward)
    assert graph_text(backward) == before


class TestGeneratedCode:
    """What Inductor makes of it: products go straight into the buffer, and no kernel passes over it once more."""

    def code(self, model, x):
        backward = lower_module(model, x, emitter=Emitter("inductor")).program.graphs.backward_weight
        values = random_values(backward)
        module = accumulating(backward)
        expected = run_graph(backward, values)
        buffers = [torch.zeros_like(gradient) for gradient in expected]
        with torch.no_grad():
            _, (code,) = run_and_get_code(lambda: Emitter("inductor").emit(module, "W")([*values.values(), *buffers]))
        torch.testing.assert_close(buffers, expected)
        return code[code.index("def call(") :]

    def test_linear(self):
        code = self.code(nn.Linear(64, 48, bias=False), torch.randn(32, 64, requires_grad=True))
        assert len(re.findall(r"torch\.ops\.twobp\.addmm_\.default\(", code)) == 1
        assert "empty_strided" not in code
        assert "cpp_fused" not in code

    def test_mlp(self):
        code = self.code(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64)), torch.randn(32, 64, requires_grad=True))
        assert len(re.findall(r"torch\.ops\.twobp\.addmm_\.default\(", code)) == 2
        assert not re.search(r"empty_strided\w*\(\((64, 48|48, 64)\)", code), "no new memory for a weight's gradient"
