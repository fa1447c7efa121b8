"""F, I and W as text, for the blocks models are made of; beside each, that I then W is bitwise the unsplit backward.

All blocks are middle stages (the input requires a gradient) unless they take token ids. To accept a changed text:
EXPECTTEST_ACCEPT=1 pytest tests/test_split_golden.py
"""

# ruff: noqa: E501

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.helpers import Lowered, assert_split_is_exact, graph_text, lower_module

torch.set_num_threads(1)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def text(lowered: Lowered) -> str:
    graphs = lowered.program.graphs
    halves = {"F": graphs.forward, "I": graphs.backward_input, "W": graphs.backward_weight}
    return "\n".join(f"{letter}:\n{graph_text(graph)}" for letter, graph in halves.items())


def linear() -> Lowered:
    return lower_module(nn.Linear(8, 4), torch.randn(2, 8, requires_grad=True))


def mlp_with_frozen_middle() -> Lowered:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    model[2].requires_grad_(False)
    return lower_module(model, torch.randn(2, 4, requires_grad=True))


def conv_bn_relu() -> Lowered:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return lower_module(model, torch.randn(2, 2, 5, 5, requires_grad=True))


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def attention() -> Lowered:
    return lower_module(Attention(), torch.randn(2, 3, 8, requires_grad=True))


class TiedEmbedding(nn.Module):
    def __init__(self, words: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.project = nn.Linear(width, words, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, ids: Tensor, residual: Tensor) -> Tensor:
        return self.project(F.tanh(self.embed(ids) + residual))


def tied_embedding() -> Lowered:
    return lower_module(TiedEmbedding(), torch.tensor([[0, 2, 4]]), torch.randn(1, 3, 4, requires_grad=True))


BLOCKS = [linear, mlp_with_frozen_middle, conv_bn_relu, attention, tied_embedding]


@pytest.mark.parametrize("block", BLOCKS)
def test_halves_are_bitwise_the_whole(block):
    torch.manual_seed(0)
    assert_split_is_exact(block(), **TOLERANCE)


def test_linear():
    assert_expected_inline(
        text(linear()),
        """\
F:
%primals_1 = input(p_model_weight) : f32[4, 8]
%primals_2 = input(p_model_bias) : f32[4]
%primals_3 = input(x0) : f32[2, 8]
%t = aten.t(%primals_1) : f32[8, 4]
%addmm = aten.addmm(%primals_2, %primals_3, %t) : f32[2, 4]
%t_1 = aten.t(%t) : f32[4, 8]
return %addmm as y0, %t_1
I:
%t_1 = input() : f32[4, 8]
%tangents_1 = input(d y0) : f32[2, 4]
%mm = aten.mm(%tangents_1, %t_1) : f32[2, 8]
return %mm as d x0
W:
%primals_3 = input(x0) : f32[2, 8]
%tangents_1 = input(d y0) : f32[2, 4]
%t_2 = aten.t(%tangents_1) : f32[4, 2]
%mm_1 = aten.mm(%t_2, %primals_3) : f32[4, 8]
%t_3 = aten.t(%mm_1) : f32[8, 4]
%sum_1 = aten.sum.dim_IntList(%tangents_1, [0], True) : f32[1, 4]
%view = aten.view(%sum_1, [4]) : f32[4]
%t_4 = aten.t(%t_3) : f32[4, 8]
return %t_4 as d p_model_weight, %view as d p_model_bias""",
    )


def test_mlp_with_frozen_middle():
    assert_expected_inline(
        text(mlp_with_frozen_middle()),
        """\
F:
%primals_1 = input(p_model_0_weight) : f32[6, 4]
%primals_2 = input(p_model_0_bias) : f32[6]
%primals_3 = input(p_model_2_weight) : f32[6, 6]
%primals_4 = input(p_model_2_bias) : f32[6]
%primals_5 = input(p_model_4_weight) : f32[4, 6]
%primals_6 = input(p_model_4_bias) : f32[4]
%primals_7 = input(x0) : f32[2, 4]
%t = aten.t(%primals_1) : f32[4, 6]
%addmm = aten.addmm(%primals_2, %primals_7, %t) : f32[2, 6]
%relu = aten.relu(%addmm) : f32[2, 6]
%detach = aten.detach(%relu) : f32[2, 6]
%t_1 = aten.t(%primals_3) : f32[6, 6]
%addmm_1 = aten.addmm(%primals_4, %relu, %t_1) : f32[2, 6]
%relu_1 = aten.relu(%addmm_1) : f32[2, 6]
%t_2 = aten.t(%primals_5) : f32[6, 4]
%addmm_2 = aten.addmm(%primals_6, %relu_1, %t_2) : f32[2, 4]
%t_3 = aten.t(%t_2) : f32[4, 6]
%t_7 = aten.t(%t_1) : f32[6, 6]
%detach_3 = aten.detach(%detach) : f32[2, 6]
%t_8 = aten.t(%t) : f32[6, 4]
return %addmm_2 as y0, %relu_1, %t_3, %t_7, %detach_3, %t_8
I:
%relu_1 = input() : f32[2, 6]
%t_3 = input() : f32[4, 6]
%t_7 = input() : f32[6, 6]
%detach_3 = input() : f32[2, 6]
%t_8 = input() : f32[6, 4]
%tangents_1 = input(d y0) : f32[2, 4]
%mm = aten.mm(%tangents_1, %t_3) : f32[2, 6]
%detach_1 = aten.detach(%relu_1) : f32[2, 6]
%detach_2 = aten.detach(%detach_1) : f32[2, 6]
%threshold_backward = aten.threshold_backward(%mm, %detach_2, 0) : f32[2, 6]
%mm_2 = aten.mm(%threshold_backward, %t_7) : f32[2, 6]
%threshold_backward_1 = aten.threshold_backward(%mm_2, %detach_3, 0) : f32[2, 6]
%mm_3 = aten.mm(%threshold_backward_1, %t_8) : f32[2, 4]
return %mm_3 as d x0, %threshold_backward_1
W:
%primals_7 = input(x0) : f32[2, 4]
%relu_1 = input() : f32[2, 6]
%tangents_1 = input(d y0) : f32[2, 4]
%threshold_backward_1 = input() : f32[2, 6]
%t_4 = aten.t(%tangents_1) : f32[4, 2]
%mm_1 = aten.mm(%t_4, %relu_1) : f32[4, 6]
%t_5 = aten.t(%mm_1) : f32[6, 4]
%sum_1 = aten.sum.dim_IntList(%tangents_1, [0], True) : f32[1, 4]
%view = aten.view(%sum_1, [4]) : f32[4]
%t_6 = aten.t(%t_5) : f32[4, 6]
%t_9 = aten.t(%threshold_backward_1) : f32[6, 2]
%mm_4 = aten.mm(%t_9, %primals_7) : f32[6, 4]
%t_10 = aten.t(%mm_4) : f32[4, 6]
%sum_2 = aten.sum.dim_IntList(%threshold_backward_1, [0], True) : f32[1, 6]
%view_1 = aten.view(%sum_2, [6]) : f32[6]
%t_11 = aten.t(%t_10) : f32[6, 4]
return %t_11 as d p_model_0_weight, %view_1 as d p_model_0_bias, %t_6 as d p_model_4_weight, %view as d p_model_4_bias""",
    )


def test_conv_bn_relu():
    assert_expected_inline(
        text(conv_bn_relu()),
        """\
F:
%primals_1 = input(p_model_0_weight) : f32[4, 2, 3, 3]
%primals_2 = input(p_model_1_weight) : f32[4]
%primals_3 = input(p_model_1_bias) : f32[4]
%primals_4 = input(b_model_1_running_mean) : f32[4]
%primals_5 = input(b_model_1_running_var) : f32[4]
%primals_6 = input(b_model_1_num_batches_tracked) : i64[]
%primals_7 = input(x0) : f32[2, 2, 5, 5]
%convolution = aten.convolution(%primals_7, %primals_1, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1) : f32[2, 4, 3, 3]
%add = aten.add.Tensor(%primals_6, 1) : i64[]
%_native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional(%convolution, %primals_2, %primals_3, %primals_4, %primals_5, True, 0.1, 1e-05) : (f32[2, 4, 3, 3], f32[4], f32[4], f32[4], f32[4])
%getitem = getitem(%_native_batch_norm_legit_functional, 0) : f32[2, 4, 3, 3]
%getitem_1 = getitem(%_native_batch_norm_legit_functional, 1) : f32[4]
%getitem_2 = getitem(%_native_batch_norm_legit_functional, 2) : f32[4]
%getitem_3 = getitem(%_native_batch_norm_legit_functional, 3) : f32[4]
%getitem_4 = getitem(%_native_batch_norm_legit_functional, 4) : f32[4]
%relu = aten.relu(%getitem) : f32[2, 4, 3, 3]
%detach = aten.detach(%relu) : f32[2, 4, 3, 3]
%detach_1 = aten.detach(%detach) : f32[2, 4, 3, 3]
return %getitem_3 as new b_model_1_running_mean, %getitem_4 as new b_model_1_running_var, %add as new b_model_1_num_batches_tracked, %relu as y0, %convolution, %getitem_1, %getitem_2, %getitem_3, %getitem_4, %detach_1
I:
%primals_1 = input(p_model_0_weight) : f32[4, 2, 3, 3]
%primals_2 = input(p_model_1_weight) : f32[4]
%primals_7 = input(x0) : f32[2, 2, 5, 5]
%convolution = input() : f32[2, 4, 3, 3]
%getitem_1 = input() : f32[4]
%getitem_2 = input() : f32[4]
%getitem_3 = input() : f32[4]
%getitem_4 = input() : f32[4]
%detach_1 = input() : f32[2, 4, 3, 3]
%tangents_1 = input(d y0) : f32[2, 4, 3, 3]
%threshold_backward = aten.threshold_backward(%tangents_1, %detach_1, 0) : f32[2, 4, 3, 3]
%native_batch_norm_backward = aten.native_batch_norm_backward(%threshold_backward, %convolution, %primals_2, %getitem_3, %getitem_4, %getitem_1, %getitem_2, True, 1e-05, [True, True, True]) : (f32[2, 4, 3, 3], f32[4], f32[4])
%getitem_5 = getitem(%native_batch_norm_backward, 0) : f32[2, 4, 3, 3]
%getitem_6 = getitem(%native_batch_norm_backward, 1) : f32[4]
%getitem_7 = getitem(%native_batch_norm_backward, 2) : f32[4]
%convolution_backward_default = aten.convolution_backward(%getitem_5, %primals_7, %primals_1, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]) : (f32[2, 2, 5, 5], none, none)
%getitem_8 = getitem(%convolution_backward_default, 0) : f32[2, 2, 5, 5]
return %getitem_8 as d x0, %getitem_5, %getitem_6, %getitem_7
W:
%primals_1 = input(p_model_0_weight) : f32[4, 2, 3, 3]
%primals_7 = input(x0) : f32[2, 2, 5, 5]
%getitem_5 = input() : f32[2, 4, 3, 3]
%getitem_6 = input() : f32[4]
%getitem_7 = input() : f32[4]
%convolution_backward_default_1 = aten.convolution_backward(%getitem_5, %primals_7, %primals_1, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]) : (none, f32[4, 2, 3, 3], none)
%getitem_9 = getitem(%convolution_backward_default_1, 1) : f32[4, 2, 3, 3]
return %getitem_9 as d p_model_0_weight, %getitem_6 as d p_model_1_weight, %getitem_7 as d p_model_1_bias""",
    )


def test_attention():
    assert_expected_inline(
        text(attention()),
        """\
F:
%primals_1 = input(p_model_qkv_weight) : f32[24, 8]
%primals_2 = input(p_model_out_weight) : f32[8, 8]
%primals_3 = input(x0) : f32[2, 3, 8]
%t = aten.t(%primals_1) : f32[8, 24]
%view = aten.view(%primals_3, [6, 8]) : f32[6, 8]
%mm = aten.mm(%view, %t) : f32[6, 24]
%_unsafe_view = aten._unsafe_view(%mm, [2, 3, 24]) : f32[2, 3, 24]
%split = aten.split.Tensor(%_unsafe_view, 8, -1) : (f32[2, 3, 8], f32[2, 3, 8], f32[2, 3, 8])
%getitem = getitem(%split, 0) : f32[2, 3, 8]
%getitem_1 = getitem(%split, 1) : f32[2, 3, 8]
%getitem_2 = getitem(%split, 2) : f32[2, 3, 8]
%view_1 = aten.view(%getitem, [2, 3, 2, 4]) : f32[2, 3, 2, 4]
%transpose = aten.transpose.int(%view_1, 1, 2) : f32[2, 2, 3, 4]
%view_2 = aten.view(%getitem_1, [2, 3, 2, 4]) : f32[2, 3, 2, 4]
%transpose_1 = aten.transpose.int(%view_2, 1, 2) : f32[2, 2, 3, 4]
%view_3 = aten.view(%getitem_2, [2, 3, 2, 4]) : f32[2, 3, 2, 4]
%transpose_2 = aten.transpose.int(%view_3, 1, 2) : f32[2, 2, 3, 4]
%transpose_3 = aten.transpose.int(%transpose_1, -1, -2) : f32[2, 2, 4, 3]
%expand = aten.expand(%transpose, [2, 2, 3, 4]) : f32[2, 2, 3, 4]
%clone = aten.clone(%expand, memory_format=torch.contiguous_format) : f32[2, 2, 3, 4]
%_unsafe_view_1 = aten._unsafe_view(%clone, [4, 3, 4]) : f32[4, 3, 4]
%expand_1 = aten.expand(%transpose_3, [2, 2, 4, 3]) : f32[2, 2, 4, 3]
%clone_1 = aten.clone(%expand_1, memory_format=torch.contiguous_format) : f32[2, 2, 4, 3]
%_unsafe_view_2 = aten._unsafe_view(%clone_1, [4, 4, 3]) : f32[4, 4, 3]
%bmm = aten.bmm(%_unsafe_view_1, %_unsafe_view_2) : f32[4, 3, 3]
%view_4 = aten.view(%bmm, [2, 2, 3, 3]) : f32[2, 2, 3, 3]
%_softmax = aten._softmax(%view_4, -1, False) : f32[2, 2, 3, 3]
%expand_2 = aten.expand(%_softmax, [2, 2, 3, 3]) : f32[2, 2, 3, 3]
%view_5 = aten.view(%expand_2, [4, 3, 3]) : f32[4, 3, 3]
%expand_3 = aten.expand(%transpose_2, [2, 2, 3, 4]) : f32[2, 2, 3, 4]
%clone_2 = aten.clone(%expand_3, memory_format=torch.contiguous_format) : f32[2, 2, 3, 4]
%_unsafe_view_3 = aten._unsafe_view(%clone_2, [4, 3, 4]) : f32[4, 3, 4]
%bmm_1 = aten.bmm(%view_5, %_unsafe_view_3) : f32[4, 3, 4]
%view_6 = aten.view(%bmm_1, [2, 2, 3, 4]) : f32[2, 2, 3, 4]
%transpose_4 = aten.transpose.int(%view_6, 1, 2) : f32[2, 3, 2, 4]
%clone_3 = aten.clone(%transpose_4, memory_format=torch.contiguous_format) : f32[2, 3, 2, 4]
%_unsafe_view_4 = aten._unsafe_view(%clone_3, [2, 3, 8]) : f32[2, 3, 8]
%t_1 = aten.t(%primals_2) : f32[8, 8]
%view_7 = aten.view(%_unsafe_view_4, [6, 8]) : f32[6, 8]
%mm_1 = aten.mm(%view_7, %t_1) : f32[6, 8]
%_unsafe_view_5 = aten._unsafe_view(%mm_1, [2, 3, 8]) : f32[2, 3, 8]
%t_4 = aten.t(%t_1) : f32[8, 8]
%transpose_7 = aten.transpose.int(%_unsafe_view_3, 1, 2) : f32[4, 4, 3]
%transpose_8 = aten.transpose.int(%_unsafe_view_1, 1, 2) : f32[4, 4, 3]
%transpose_9 = aten.transpose.int(%_unsafe_view_2, 1, 2) : f32[4, 3, 4]
%t_8 = aten.t(%t) : f32[24, 8]
return %_unsafe_view_5 as y0, %view, %_softmax, %view_7, %t_4, %transpose_7, %transpose_8, %transpose_9, %t_8
I:
%_softmax = input() : f32[2, 2, 3, 3]
%t_4 = input() : f32[8, 8]
%transpose_7 = input() : f32[4, 4, 3]
%transpose_8 = input() : f32[4, 4, 3]
%transpose_9 = input() : f32[4, 3, 4]
%t_8 = input() : f32[24, 8]
%tangents_1 = input(d y0) : f32[2, 3, 8]
%view_8 = aten.view(%tangents_1, [6, 8]) : f32[6, 8]
%mm_3 = aten.mm(%view_8, %t_4) : f32[6, 8]
%view_9 = aten.view(%mm_3, [2, 3, 8]) : f32[2, 3, 8]
%view_10 = aten.view(%view_9, [2, 3, 2, 4]) : f32[2, 3, 2, 4]
%transpose_5 = aten.transpose.int(%view_10, 1, 2) : f32[2, 2, 3, 4]
%clone_4 = aten.clone(%transpose_5, memory_format=torch.contiguous_format) : f32[2, 2, 3, 4]
%_unsafe_view_6 = aten._unsafe_view(%clone_4, [4, 3, 4]) : f32[4, 3, 4]
%expand_2 = aten.expand(%_softmax, [2, 2, 3, 3]) : f32[2, 2, 3, 3]
%view_5 = aten.view(%expand_2, [4, 3, 3]) : f32[4, 3, 3]
%transpose_6 = aten.transpose.int(%view_5, 1, 2) : f32[4, 3, 3]
%bmm_2 = aten.bmm(%transpose_6, %_unsafe_view_6) : f32[4, 3, 4]
%bmm_3 = aten.bmm(%_unsafe_view_6, %transpose_7) : f32[4, 3, 3]
%view_11 = aten.view(%bmm_2, [2, 2, 3, 4]) : f32[2, 2, 3, 4]
%view_12 = aten.view(%bmm_3, [2, 2, 3, 3]) : f32[2, 2, 3, 3]
%detach = aten.detach(%_softmax) : f32[2, 2, 3, 3]
%detach_1 = aten.detach(%detach) : f32[2, 2, 3, 3]
%_softmax_backward_data = aten._softmax_backward_data(%view_12, %detach_1, -1, torch.float32) : f32[2, 2, 3, 3]
%view_13 = aten.view(%_softmax_backward_data, [4, 3, 3]) : f32[4, 3, 3]
%bmm_4 = aten.bmm(%transpose_8, %view_13) : f32[4, 4, 3]
%bmm_5 = aten.bmm(%view_13, %transpose_9) : f32[4, 3, 4]
%view_14 = aten.view(%bmm_4, [2, 2, 4, 3]) : f32[2, 2, 4, 3]
%view_15 = aten.view(%bmm_5, [2, 2, 3, 4]) : f32[2, 2, 3, 4]
%transpose_10 = aten.transpose.int(%view_14, -1, -2) : f32[2, 2, 3, 4]
%transpose_11 = aten.transpose.int(%view_11, 1, 2) : f32[2, 3, 2, 4]
%clone_5 = aten.clone(%transpose_11, memory_format=torch.contiguous_format) : f32[2, 3, 2, 4]
%_unsafe_view_7 = aten._unsafe_view(%clone_5, [2, 3, 8]) : f32[2, 3, 8]
%transpose_12 = aten.transpose.int(%transpose_10, 1, 2) : f32[2, 3, 2, 4]
%view_16 = aten.view(%transpose_12, [2, 3, 8]) : f32[2, 3, 8]
%transpose_13 = aten.transpose.int(%view_15, 1, 2) : f32[2, 3, 2, 4]
%clone_6 = aten.clone(%transpose_13, memory_format=torch.contiguous_format) : f32[2, 3, 2, 4]
%_unsafe_view_8 = aten._unsafe_view(%clone_6, [2, 3, 8]) : f32[2, 3, 8]
%cat = aten.cat([%_unsafe_view_8, %view_16, %_unsafe_view_7], 2) : f32[2, 3, 24]
%view_17 = aten.view(%cat, [6, 24]) : f32[6, 24]
%mm_5 = aten.mm(%view_17, %t_8) : f32[6, 8]
%view_18 = aten.view(%mm_5, [2, 3, 8]) : f32[2, 3, 8]
return %view_18 as d x0, %view_8, %view_17
W:
%view = input() : f32[6, 8]
%view_7 = input() : f32[6, 8]
%view_8 = input() : f32[6, 8]
%view_17 = input() : f32[6, 24]
%t_2 = aten.t(%view_8) : f32[8, 6]
%mm_2 = aten.mm(%t_2, %view_7) : f32[8, 8]
%t_3 = aten.t(%mm_2) : f32[8, 8]
%t_5 = aten.t(%t_3) : f32[8, 8]
%t_6 = aten.t(%view_17) : f32[24, 6]
%mm_4 = aten.mm(%t_6, %view) : f32[24, 8]
%t_7 = aten.t(%mm_4) : f32[8, 24]
%t_9 = aten.t(%t_7) : f32[24, 8]
return %t_9 as d p_model_qkv_weight, %t_5 as d p_model_out_weight""",
    )


def test_tied_embedding():
    assert_expected_inline(
        text(tied_embedding()),
        """\
F:
%primals_1 = input(p_model_project_weight) : f32[5, 4]
%primals_2 = input(x0) : i64[1, 3]
%primals_3 = input(x1) : f32[1, 3, 4]
%embedding = aten.embedding(%primals_1, %primals_2) : f32[1, 3, 4]
%add = aten.add.Tensor(%embedding, %primals_3) : f32[1, 3, 4]
%tanh = aten.tanh(%add) : f32[1, 3, 4]
%t = aten.t(%primals_1) : f32[4, 5]
%view = aten.view(%tanh, [3, 4]) : f32[3, 4]
%mm = aten.mm(%view, %t) : f32[3, 5]
%_unsafe_view = aten._unsafe_view(%mm, [1, 3, 5]) : f32[1, 3, 5]
%t_3 = aten.t(%t) : f32[5, 4]
return %_unsafe_view as y0, %tanh, %t_3
I:
%tanh = input() : f32[1, 3, 4]
%t_3 = input() : f32[5, 4]
%tangents_1 = input(d y0) : f32[1, 3, 5]
%view_1 = aten.view(%tangents_1, [3, 5]) : f32[3, 5]
%mm_2 = aten.mm(%view_1, %t_3) : f32[3, 4]
%view_2 = aten.view(%mm_2, [1, 3, 4]) : f32[1, 3, 4]
%detach = aten.detach(%tanh) : f32[1, 3, 4]
%detach_1 = aten.detach(%detach) : f32[1, 3, 4]
%tanh_backward = aten.tanh_backward(%view_2, %detach_1) : f32[1, 3, 4]
return %tanh_backward as d x1, %view_1, %tanh_backward
W:
%primals_2 = input(x0) : i64[1, 3]
%tanh = input() : f32[1, 3, 4]
%view_1 = input() : f32[3, 5]
%tanh_backward = input() : f32[1, 3, 4]
%t_1 = aten.t(%view_1) : f32[5, 3]
%view = aten.view(%tanh, [3, 4]) : f32[3, 4]
%mm_1 = aten.mm(%t_1, %view) : f32[5, 4]
%t_2 = aten.t(%mm_1) : f32[4, 5]
%t_4 = aten.t(%t_2) : f32[5, 4]
%embedding_dense_backward = aten.embedding_dense_backward(%tanh_backward, %primals_2, 5, -1, False) : f32[5, 4]
%add_1 = aten.add.Tensor(%t_4, %embedding_dense_backward) : f32[5, 4]
return %add_1 as d p_model_project_weight""",
    )
