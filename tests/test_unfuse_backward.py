"""unfuse_backward: every convolution's backward in two halves is bitwise the fused one."""

import operator

import pytest
import torch
from torch import Tensor, fx, nn

from tests.helpers import assert_split_is_exact, backward_graph, equal, joint_graph, lower_module, run_graph, targets
from twobp_fx.passes.graph import operations, outputs, placeholders
from twobp_fx.passes.partition_joint import partition_joint
from twobp_fx.passes.unfuse_backward import unfuse_backward

torch.set_num_threads(1)

FUSED = "aten.convolution_backward"
LAYERS = {
    "conv1d": (lambda **kw: nn.Conv1d(4, 6, 3, **kw), (2, 4, 7)),
    "conv2d": (lambda **kw: nn.Conv2d(4, 6, 3, stride=2, padding=1, **kw), (2, 4, 6, 5)),
    "conv2d, dilated": (lambda **kw: nn.Conv2d(4, 6, 2, dilation=2, **kw), (2, 4, 6, 5)),
    "conv2d, 2 groups": (lambda **kw: nn.Conv2d(4, 6, 3, groups=2, **kw), (2, 4, 5, 5)),
    "conv2d, depthwise": (lambda **kw: nn.Conv2d(4, 4, 3, groups=4, **kw), (2, 4, 5, 5)),
    "conv1d, transposed": (lambda **kw: nn.ConvTranspose1d(4, 6, 3, **kw), (2, 4, 7)),
    "conv2d, transposed": (lambda **kw: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, **kw), (2, 4, 4, 4)),
    "conv3d": (lambda **kw: nn.Conv3d(2, 3, 2, **kw), (1, 2, 3, 3, 3)),
}


def backward_of(layer: nn.Module, x: Tensor) -> fx.GraphModule:
    return partition_joint(joint_graph(layer, x)).backward


def values_for(backward: fx.GraphModule) -> dict[str, Tensor]:
    return {node.name: torch.randn(node.meta["val"].shape) for node in placeholders(backward.graph)}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_halves_are_bitwise_the_fused_call(name, bias):
    make, shape = LAYERS[name]
    layer, x = make(bias=bias), torch.randn(shape, requires_grad=True)
    backward = backward_of(layer, x)
    values = values_for(backward)
    fused, count = run_graph(backward, values), len(operations(backward.graph))
    assert targets(backward).count(FUSED) == 1

    assert unfuse_backward(backward)
    assert targets(backward).count(FUSED) == 2
    assert len(operations(backward.graph)) == count + 1
    assert all(equal(a, b) for a, b in zip(run_graph(backward, values), fused, strict=True))
    for node in operations(backward.graph):
        if node.target is operator.getitem:  # the shapes on record are those of what is really computed
            assert isinstance(node.meta["val"], Tensor)
            assert node.args[0].meta["val"][node.args[1]].shape == node.meta["val"].shape
    assert not unfuse_backward(backward), "a second time there is nothing left to do"


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_input_half_does_without_the_weight_half(name, bias):
    make, shape = LAYERS[name]
    model = nn.Sequential(make(bias=bias), nn.Tanh())
    lowered = lower_module(model, torch.randn(shape, requires_grad=True))
    assert_split_is_exact(lowered)
    graphs = lowered.program.graphs
    for half, mask in ((graphs.backward_input, [True, False, False]), (graphs.backward_weight, [False, True, bias])):
        (node,) = (node for node in operations(half.graph) if node.target is torch.ops.aten.convolution_backward.default)
        assert node.args[-1] == mask
    assert len(outputs(graphs.backward_input.graph)) == 2  # the input's gradient, and tanh's, which both halves need


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids="+".join)
def test_frozen_parameters(frozen):
    layer = nn.Conv2d(2, 3, 3)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    x = torch.randn(2, 2, 4, 4, requires_grad=True)
    backward = backward_of(layer, x)
    values = values_for(backward)
    before, fused = backward.code, run_graph(backward, values)
    changed = unfuse_backward(backward)
    assert changed == (len(frozen) == 1)
    assert (backward.code == before) == (not changed)
    assert all(equal(a, b) for a, b in zip(run_graph(backward, values), fused, strict=True))
    assert_split_is_exact(lower_module(layer, x))


def test_nothing_changes_without_an_input_gradient():
    backward = backward_of(nn.Conv2d(2, 3, 3), torch.randn(2, 2, 4, 4))
    before = backward.code
    assert not unfuse_backward(backward)
    assert backward.code == before


def test_nothing_changes_without_a_convolution():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    backward = backward_of(model, torch.randn(3, 4, requires_grad=True))
    before = backward.code
    assert not unfuse_backward(backward)
    assert backward.code == before


def test_each_of_several_convolutions():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1))
    model[2].requires_grad_(False)
    lowered = lower_module(model, torch.randn(2, 2, 6, 6, requires_grad=True))
    assert_split_is_exact(lowered)
    graphs = lowered.program.graphs
    assert targets(graphs.backward_input).count(FUSED) == 3
    assert targets(graphs.backward_weight).count(FUSED) == 2


def test_halves_that_are_apart_already_stay():
    def function(g, a, w):
        def half(mask):
            return torch.ops.aten.convolution_backward(
                g, a, w, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [mask, not mask, not mask]
            )

        return half(True)[0], half(False)[1], half(False)[2]

    values = {"g": torch.randn(2, 3, 2, 2), "a": torch.randn(2, 2, 4, 4), "w": torch.randn(3, 2, 3, 3)}
    backward = backward_graph(function, values, ["x", "weight", "bias"])
    backward.graph.eliminate_dead_code()
    assert not unfuse_backward(backward)
    assert targets(backward).count(FUSED) == 3
