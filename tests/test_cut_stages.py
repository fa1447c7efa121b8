"""cut_stages: balanced cuts against all cuts there are, cuts at modules, skips, writes in place, refusals."""

import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.helpers import assert_split_is_exact, lower_module
from twobp_fx.capture import capture_forward
from twobp_fx.errors import CutError, InputError
from twobp_fx.inputs import Inputs
from twobp_fx.passes.costs import node_cost, node_flops
from twobp_fx.passes.cut_stages import BALANCE_TOLERANCE, SourceKind, StageGraph, cut_stages
from twobp_fx.passes.graph import operations, outputs, placeholders, value_bytes

torch.set_num_threads(1)


def captured(model: nn.Module, *args: Tensor) -> fx.GraphModule:
    return capture_forward(model, Inputs.flatten(args, {}, None), want_loss=False).module


def names(stage: StageGraph) -> list[str]:
    return [node.name for node in operations(stage.module.graph)]


class Skip(nn.Module):
    """The first layer's value is used again by the last."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x).tanh()
        return self.last(self.third(self.second(skip).tanh()).tanh() + skip)


class Uneven(nn.Module):
    """Layers of many sizes, a wide value in the middle."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [8, 24, 4, 16, 16, 2, 12]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = x.relu() if i % 2 else x
        return x.softmax(-1)


class WideBetween(nn.Module):
    """Two layers; between them the value grows and shrinks again: the even cut sends it wide, a near one narrow."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([self.first(x)] * 2, -1)
        return self.second(wide.tanh()[:, ::2].contiguous())


# By brute force -------------------------------------------------------------------------------------------------------


def heaviest(nodes: Sequence[fx.Node], cuts: Sequence[int]) -> int:
    bounds = [0, *cuts, len(nodes)]
    return max(sum(map(node_cost, nodes[a:b])) for a, b in itertools.pairwise(bounds))


def bytes_sent(nodes: Sequence[fx.Node], cuts: Sequence[int]) -> int:
    total = 0
    for cut in cuts:
        before, after = set(nodes[:cut]), set(nodes[cut:])
        total += sum(
            value_bytes(node.meta["val"]) for node in before if any(user in after or user.op == "output" for user in node.users)
        )
    return total


def every_cut(nodes: Sequence[fx.Node], stages: int) -> list[tuple[int, ...]]:
    """All cuts that leave a layer in each stage."""

    def is_layer(node: fx.Node) -> bool:
        sources = [argument.meta.get("source") for argument in node.all_input_nodes]
        return node_flops(node) > 0 or any(s is not None and s.kind is SourceKind.PARAMETER for s in sources)

    layers = [is_layer(node) for node in nodes]
    return [
        cuts
        for cuts in itertools.combinations(range(1, len(nodes)), stages - 1)
        if all(any(layers[a:b]) for a, b in itertools.pairwise([0, *cuts, len(nodes)]))
    ]


MODELS = {
    "mlp": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), (4, 8)),
    "uneven": (Uneven, (3, 8)),
    "skip": (Skip, (4, 8)),
    "wide between": (WideBetween, (8, 512)),
    "norms": (
        lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8)),
        (4, 8),
    ),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
        (2, 2, 6, 6),
    ),
}


@pytest.mark.parametrize(
    ("name", "stages"),
    [(name, stages) for name in MODELS for stages in (1, 2, 3) if (name, stages) != ("wide between", 3)],
)
def test_balanced_cut_is_the_best_of_all(name, stages):
    make, shape = MODELS[name]
    module = captured(make(), torch.randn(shape))
    nodes = operations(module.graph)
    cut = cut_stages(module, stages)
    sizes = [len(names(stage)) for stage in cut]
    chosen = list(itertools.accumulate(sizes))[:-1]
    assert [name for stage in cut for name in names(stage)] == [node.name for node in nodes]

    candidates = every_cut(nodes, stages)
    assert tuple(chosen) in candidates
    lightest = min(heaviest(nodes, cuts) for cuts in candidates)
    assert heaviest(nodes, chosen) <= lightest * (1 + BALANCE_TOLERANCE) * 1.002  # 1.002: the search stops this close
    near = [cuts for cuts in candidates if heaviest(nodes, cuts) <= lightest * (1 + BALANCE_TOLERANCE)]
    assert bytes_sent(nodes, chosen) <= min(bytes_sent(nodes, cuts) for cuts in near)


def test_among_near_equal_cuts_the_one_that_sends_least():
    module = captured(WideBetween(), torch.randn(8, 512))
    nodes = operations(module.graph)
    first, _ = cut_stages(module, 2)
    (sent,) = outputs(first.module.graph)
    assert tuple(sent.meta["val"].shape) == (8, 512)
    best = min(every_cut(nodes, 2), key=lambda cuts: heaviest(nodes, cuts))
    assert bytes_sent(nodes, best) > bytes_sent(nodes, [len(names(first))]), "the lightest cut of all sends more"


def test_search_grows_with_the_graph_and_not_with_its_square():
    def calls(layers: int) -> int:
        module = captured(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), torch.randn(2, 4))
        count = 0

        def profile(frame, event, argument) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            cut_stages(module, 4)
        finally:
            sys.setprofile(None)
        return count

    calls(8)  # the first call of each operator's formula does more
    small, large = calls(20), calls(80)
    assert large < 4 * small * 1.5


# What stages exchange -------------------------------------------------------------------------------------------------


def test_skip_is_carried_by_the_stage_between():
    x = torch.randn(4, 8, requires_grad=True)
    lowered = lower_module(Skip(), x, stages=["second", "third", "last"])
    module = captured(Skip(), x)
    cut = cut_stages(module, ["second", "third", "last"])
    assert [stage.receives for stage in cut] == [(), *(stage.sends for stage in cut[:-1])]
    (skip,) = cut[0].sends
    assert [skip in stage.carries for stage in cut] == [False, True, False, False]
    assert cut[1].carries == (skip,)
    assert len(cut[2].sends) == 1  # added to, and then no longer needed
    assert skip not in [node.name for node in outputs(cut[1].module.graph)]
    assert_split_is_exact(lowered)


def test_skip_over_a_stage_that_does_not_read_it():
    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            skip = self.first(x)
            h = self.second(skip.detach())
            return self.last(self.third(h).tanh() * skip), skip

    x = torch.randn(3, 4, requires_grad=True)
    lowered = lower_module(Over(), x, stages=["second", "third", "last"])
    assert_split_is_exact(lowered)


def test_stages_read_parameters_buffers_and_inputs_directly():
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.register_buffer("shift", torch.randn(4))
            self.second.weight = self.first.weight

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return self.second((self.first(x) + self.shift).tanh() + condition) * self.shift

    args = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    module = captured(Conditioned(), *args)
    first, second = cut_stages(module, ["second"])
    sources = [{(n.meta["source"].kind, n.meta["source"].key) for n in placeholders(s.module.graph)} for s in (first, second)]
    weight, shift = (SourceKind.PARAMETER, "first.weight"), (SourceKind.BUFFER, "shift")
    assert {weight, shift} <= sources[0] & sources[1]
    assert [kind for kind, _ in sources[1]].count(SourceKind.RECEIVED) == 1
    assert_split_is_exact(lower_module(Conditioned(), *args, stages=["second"]))


def test_output_of_an_early_stage_is_carried_to_the_end():
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.first(x)
            return {"early": h, "late": self.third(self.second(h).tanh()), "again": h * 2}

    x = torch.randn(3, 4, requires_grad=True)
    assert_split_is_exact(lower_module(_Values(Early()), x, stages=["model.second", "model.third"]))


class _Values(nn.Module):
    """A model that returns a dict, as one that returns its values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.model(x).values())


class Boundary(nn.Module):
    """`send` makes what goes past the module `layer`, `receive` what becomes of it."""

    def __init__(self, send: Callable[..., tuple[Tensor, ...]], receive: Callable[..., Any]) -> None:
        super().__init__()
        self.send, self.receive = send, receive
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("buf", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        first, *rest = self.send(self, x @ self.weight)
        return self.receive(self.layer(first), *rest)


@pytest.mark.parametrize(
    ("send", "receive"),
    [
        (lambda m, h: (h.sum(0, keepdim=True).expand(3, 4),), lambda h: h),
        (lambda m, h: (h, h.sum(0, keepdim=True).expand(3, 4)), lambda h, wide: h * wide),
        (lambda m, h: (h.t().contiguous().t(),), lambda h: h),
        (lambda m, h: (h, h.repeat(1, 2)[:, ::2]), lambda h, g: h * g),
        (lambda m, h: (h, h > 0, (h > 0).long()), lambda h, mask, ids: h * mask + ids),
        (lambda m, h: (h, h.view(-1), h), lambda h, flat, same: h + flat.view(3, 4) * same),
        (lambda m, h: (h, m.weight * 1, m.weight.t()), lambda h, a, b: h @ a @ b),
        (lambda m, h: (h, m.weight, m.buf), lambda h, a, b: h @ a @ b),
        (lambda m, h: (h, torch.fft.fft(h)), lambda h, spectrum: h + torch.fft.ifft(spectrum).real),
        (lambda m, h: (h, h.double()), lambda h, exact: h * exact),
        (lambda m, h: (h, h.sum()), lambda h, total: h * total),
        (lambda m, h: (h, h[:0]), lambda h, nothing: h + nothing.sum()),
        (lambda m, h: tuple(h.max(0, keepdim=True)), lambda h, index: h + index),
        (lambda m, h: (h, h.detach()), lambda h, fixed: h * fixed),
        (lambda m, h: (h, h.exp()), lambda h, unread: h),
    ],
    ids=[
        "expanded",
        "expanded skip",
        "transposed",
        "stepped",
        "integers",
        "aliases",
        "of parameters",
        "parameter and buffer",
        "complex",
        "double",
        "scalar",
        "empty",
        "tuple",
        "detached",
        "unread",
    ],
)
def test_values_of_every_kind_cross(send, receive):
    x = torch.randn(3, 4, requires_grad=True)
    assert_split_is_exact(lower_module(Boundary(send, receive), x, stages=["layer"]), rtol=1e-4, atol=1e-5)


def test_cut_at_modules_begins_with_their_first_operation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2))
    module = captured(model, torch.randn(2, 4))
    for fqns, sizes in [(["1", "2"], [1, 2, 1]), (["1.0"], [1, 3]), (["1.1"], [2, 2]), (["2"], [3, 1]), ([], [4])]:
        assert [len(names(stage)) for stage in cut_stages(module, fqns)] == sizes


def test_the_graph_is_not_changed():
    module = captured(Skip(), torch.randn(2, 8))
    before = module.code
    cut_stages(module, 3)
    cut_stages(module, ["third"])
    assert module.code == before


# Writes in place ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """As in torchvision: ReLU in place, and the shortcut added in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), *(Block(4) for _ in range(3)))


@pytest.mark.parametrize("stages", [2, 3, 4, ["3"], ["2", "3", "4"]])
def test_model_that_writes_in_place_is_cut_and_exact(stages):
    lowered = lower_module(resnet(), torch.randn(2, 2, 6, 6, requires_grad=True), stages=stages)
    assert len(lowered.programs) == (stages if isinstance(stages, int) else len(stages) + 1)
    assert_split_is_exact(lowered, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "fqn"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), "1"),
        (nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.ReLU(inplace=True), nn.Flatten()), "1"),
        (nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.ReLU(inplace=True), nn.Flatten()), "2"),
    ],
    ids=["relu", "before a view", "behind a view"],
)
def test_cut_through_a_write_in_place_is_refused(model, fqn):
    module = captured(model, torch.randn(2, 4))
    with pytest.raises(CutError, match=rf"'{fqn}'.*relu_.*writes in place.*Begin it at another module"):
        cut_stages(module, [fqn])


def test_balanced_cut_steps_around_writes_in_place():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True))
    first, second = cut_stages(captured(model, torch.randn(2, 8)), 2)
    assert [len(names(first)), len(names(second))] == [2, 2]


def test_readers_of_a_buffer_stay_with_its_writer():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return self.third(self.second(h) - self.mean)

    module = captured(Counting(), torch.randn(3, 4))
    with pytest.raises(CutError, match=r"'second'.*writes in place"):
        cut_stages(module, ["second"])
    lowered = lower_module(Counting(), torch.randn(3, 4, requires_grad=True), stages=["third"])
    assert_split_is_exact(lowered)


def test_write_into_an_argument_is_refused():
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) * 3

    with pytest.raises(InputError, match=r"mul_.*writes in place into an argument.*Clone"):
        lower_module(Writing(), torch.randn(3))


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (4, r"3 layers .*too few for 4 stages.*at most 3 stages"),
        (0, r"stages=0.*at least one"),
        (-1, r"stages=-1.*at least one"),
        (["layer.second"], r"No operation of a module 'layer\.second' ran.*Did you mean .*'layers\.second'"),
        (["zzz"], r"No operation of a module 'zzz' ran.*named_modules"),
        (["layers.unused"], r"No operation of a module 'layers\.unused' ran"),
        (["layers.third", "layers.second"], r"'layers\.second'.*not after the module named before it.*order"),
        (["layers.second", "layers.second"], r"'layers\.second'.*order"),
        (["layers.first"], r"'layers\.first'.*runs first"),
        (["layers"], r"'layers'.*runs first"),
    ],
)
def test_what_cannot_be_cut_is_refused(stages, message):
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third, self.unused = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Layers()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layers(x))

    module = captured(Model(), torch.randn(2, 4))
    with pytest.raises(CutError, match=message):
        cut_stages(module, stages)


def test_a_model_without_layers_is_one_stage():
    module = captured(nn.ReLU(), torch.randn(2, 4))
    assert len(cut_stages(module, 1)) == 1
    with pytest.raises(CutError, match="0 layers"):
        cut_stages(module, 2)


def test_a_tuple_cannot_cross():
    class Chunks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.first(x).split(2, -1)
            return self.third(self.second(torch.cat([right, left], -1)))

    module = captured(Chunks(), torch.randn(2, 4))
    nodes = operations(module.graph)
    late = next(node for node in nodes if node.target is operator.getitem)
    other = next(node for node in nodes if node.target is torch.ops.aten.cat.default)
    end = nodes[-1]
    # Part of the tuple is taken out only after the last layer: by hand, as tracers take tuples apart at once.
    with module.graph.inserting_before(end):
        moved = module.graph.node_copy(late)
        result = module.graph.call_function(torch.ops.aten.sum.default, (moved,))
    result.meta = {"val": end.meta["val"].sum()}
    with module.graph.inserting_after(end):
        total = module.graph.call_function(torch.ops.aten.add.Tensor, (end, result))
    total.meta = {"val": end.meta["val"]}
    end.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    module.recompile()
    assert other in operations(module.graph)
    with pytest.raises(CutError, match=r"'second'.*split.*is no tensor and cannot be sent"):
        cut_stages(module, ["second"])


def test_impossible_because_of_writes_in_place_names_the_obstacle():
    class OneValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * 1).mul_(self.a).mul_(self.b)

    module = captured(OneValue(), torch.randn(2, 4))
    with pytest.raises(CutError, match=r"cannot be cut into 2 stages.*First obstacle: mul_.*Ask for fewer stages"):
        cut_stages(module, 2)
