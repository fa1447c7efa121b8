"""Cut one forward graph into contiguous stages.

In:  a forward graph in program order, every placeholder with `meta["source"]` (a `Source`), every value with `meta["val"]`.
Out: one `StageGraph` a stage. Stages only ever talk to their neighbours: a value used two stages later is received and sent on
     by the stage between, untouched. Parameters, buffers and the caller's own inputs go straight to every stage that reads them.
Never: reorders, duplicates or drops an operation; separates a write in place from the values that share its storage.

    forward(p, q, x):  a = x @ p;  b = relu(a);  c = b @ q;  return c
    cut before `c`:    stage 0 (p, x) -> b        stage 1 (q, b) -> c

Where to cut: the slowest stage as light as possible (`costs.node_cost`, forward only: a backward costs about twice that
everywhere), and among the cuts within `BALANCE_TOLERANCE` of it the one that sends the fewest bytes between stages.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import torch
from torch import fx

from .costs import node_cost, node_flops
from .errors import CutError
from .graph import (
    aliased_arguments,
    build_graph,
    describe,
    module_path,
    operations,
    outputs,
    placeholders,
    value_bytes,
    written_arguments,
)

BALANCE_TOLERANCE = 0.05
"""Cuts whose slowest stage is within this of the lightest possible are near-equal; bytes sent decide among them."""


class SourceKind(StrEnum):
    """Where the value of a forward placeholder comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a forward placeholder's value comes from. `key`: a parameter's or buffer's FQN, a constant's name, an input's
    position among the flat inputs, or the name of a value received from the stage before.
    """

    kind: SourceKind
    key: str


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One stage's forward, as cut out of the whole.

    `module` takes what its placeholders' `meta["source"]` say and returns the values named in `computes`.
    `receives` and `sends` name the values that come from the stage before and go to the stage after (for the last stage: the
    model's outputs), in order. A value in both is carried: handed on untouched.
    """

    index: int
    module: fx.GraphModule
    computes: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]

    @property
    def carries(self) -> tuple[str, ...]:
        """The values this stage receives and hands on."""
        computed = set(self.computes)
        return tuple(name for name in self.sends if name not in computed)


def cut_stages(module: fx.GraphModule, stages: int | Sequence[str]) -> list[StageGraph]:
    """Cut `module` into `stages` balanced stages, or at the module FQNs where a new stage begins.

    Raises CutError if there are fewer layers than stages, if an FQN names nothing that ran or is out of order, or if a cut
    would separate a write in place from values that share its storage.
    """
    nodes = operations(module.graph)
    barriers = _barriers(module.graph, nodes)
    if isinstance(stages, int):
        positions = _balanced_cuts(module.graph, nodes, stages, barriers)
    else:
        positions = _cuts_at_modules(nodes, stages, barriers)
    return _build_stages(module, nodes, [0, *positions, len(nodes)])


def _last_uses(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each value, the position of its last reader; len(nodes) when the graph returns it."""
    position = {node: i for i, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            last[argument] = max(last.get(argument, -1), position.get(node, len(nodes) if node.op == "output" else -1))
    return last


def _barriers(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[str | None]:
    """For each cut position 0..len(nodes), why no stage may begin there, or None if one may."""
    n = len(nodes)
    position = {node: i for i, node in enumerate(nodes)}
    last = _last_uses(graph, nodes)
    reasons: list[str | None] = [None] * (n + 1)

    def forbid(first: int, final: int, reason: str) -> None:
        for i in range(max(first, 0), min(final, n) + 1):
            reasons[i] = reasons[i] or reason

    for i, node in enumerate(nodes):
        if node in last and not isinstance(node.meta.get("val"), torch.Tensor):
            forbid(i + 1, last[node], f"the value of {describe(node)} is no tensor and cannot be sent to another stage")

    # Values that may share storage, by the operators' schemas, in groups; a group somebody writes into stays in one stage.
    group: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while group.setdefault(node, node) is not node:
            node = group[node]
        return node

    for node in nodes:
        for argument in aliased_arguments(node):
            group[find(node)] = find(argument)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in [*placeholders(graph), *nodes]:
        members.setdefault(find(node), []).append(node)
    for node in nodes:
        for argument in written_arguments(node):
            family = members[find(argument)]
            owned = any(member.op == "placeholder" for member in family)  # a buffer: all its readers stay with the writer
            first = min(
                (position[m] for m in (family if not owned else [u for f in family for u in f.users]) if m in position),
                default=position[node],
            )
            final = max([position[node], *(last.get(m, -1) for m in family)]) if owned else position[node]
            forbid(first + 1, min(final, n - 1), f"{describe(node)} writes in place into a value used on both sides")
    return reasons


def _balanced_cuts(graph: fx.Graph, nodes: Sequence[fx.Node], stages: int, barriers: Sequence[str | None]) -> list[int]:
    if stages < 1:
        raise CutError(f"stages={stages}: ask for at least one stage.")
    if stages == 1:
        return []
    layer = [node_flops(node) > 0 or any(_is_parameter(argument) for argument in node.all_input_nodes) for node in nodes]
    if sum(layer) < stages:
        raise CutError(
            f"The model has {sum(layer)} layers (operations that read parameters or multiply matrices), too few for "
            f"{stages} stages. Ask for at most {max(sum(layer), 1)} stages, or name the modules at which stages begin."
        )
    n = len(nodes)
    cost = list(accumulate((node_cost(node) for node in nodes), initial=0))
    layers = list(accumulate(layer, initial=0))
    last = _last_uses(graph, nodes)
    change = [0] * (n + 2)
    for i, node in enumerate(nodes):
        size = value_bytes(node.meta.get("val"))
        change[i + 1] += size
        change[max(last.get(node, i), i) + 1] -= size
    crossing = list(accumulate(change))[: n + 1]

    def cuts_within(bound: float) -> list[int] | None:
        return _cheapest_cuts(n, stages, cost, layers, crossing, barriers, bound)

    low, high = 0.0, float(cost[n])
    if cuts_within(high) is None:
        raise CutError(
            f"The model cannot be cut into {stages} stages: too few places lie between its layers and outside of writes in "
            f"place. First obstacle: {next((reason for reason in barriers if reason), 'none')}. Ask for fewer stages."
        )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cuts_within(middle) is not None else (middle, high)
    cuts = cuts_within(high * (1 + BALANCE_TOLERANCE))
    if cuts is None:  # cannot be: `high` itself was feasible
        raise AssertionError("no cut within a feasible bound")
    return cuts


def _is_parameter(node: fx.Node) -> bool:
    source = node.meta.get("source")
    return isinstance(source, Source) and source.kind is SourceKind.PARAMETER


def _cheapest_cuts(
    n: int,
    stages: int,
    cost: Sequence[int],
    layers: Sequence[int],
    crossing: Sequence[int],
    barriers: Sequence[str | None],
    bound: float,
) -> list[int] | None:
    """The cuts that send the fewest bytes with no stage dearer than `bound` and every stage holding a layer; None if none.

    best[j] = least bytes sent with the first s stages ending at j. The stages that may end at j begin in a window whose two
    ends only move right, so a monotone queue finds each minimum in amortized constant time: O(n) a stage.
    """
    best: list[float] = [0.0] + [math.inf] * n
    choices: list[list[int]] = []
    for stage in range(stages):
        final = stage == stages - 1
        following = [math.inf] * (n + 1)
        choice = [-1] * (n + 1)
        window: deque[int] = deque()
        entering = 0
        for j in range(1, n + 1):
            while entering < j and layers[entering] < layers[j]:
                if best[entering] < math.inf:
                    while window and best[window[-1]] >= best[entering]:
                        window.pop()
                    window.append(entering)
                entering += 1
            while window and cost[j] - cost[window[0]] > bound:
                window.popleft()
            if window and (j == n if final else j < n and barriers[j] is None):
                following[j] = best[window[0]] + (0 if final else crossing[j])
                choice[j] = window[0]
        best = following
        choices.append(choice)
    if best[n] == math.inf:
        return None
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return cuts[-2:0:-1]


def _cuts_at_modules(nodes: Sequence[fx.Node], fqns: Sequence[str], barriers: Sequence[str | None]) -> list[int]:
    first: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for fqn in module_path(node):
            first.setdefault(fqn, i)
    cuts: list[int] = []
    for fqn in fqns:
        if fqn not in first:
            near = difflib.get_close_matches(fqn, first, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else " Names come from model.named_modules()."
            raise CutError(f"No operation of a module '{fqn}' ran, so no stage can begin there.{hint}")
        cut = first[fqn]
        if cut <= (cuts[-1] if cuts else 0):
            raise CutError(
                f"A stage cannot begin at module '{fqn}': it runs first, or not after the module named before it. "
                "Name the modules in the order in which they run, without the first."
            )
        if (reason := barriers[cut]) is not None:
            raise CutError(f"A stage cannot begin at module '{fqn}': {reason}. Begin it at another module.")
        cuts.append(cut)
    return cuts


def _build_stages(module: fx.GraphModule, nodes: Sequence[fx.Node], bounds: Sequence[int]) -> list[StageGraph]:
    graph = module.graph
    position = {node: i for i, node in enumerate(nodes)}
    last = _last_uses(graph, nodes)
    returned = list(dict.fromkeys(value for value in outputs(graph) if isinstance(value, fx.Node)))
    stages: list[StageGraph] = []
    received: list[fx.Node] = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        final = end == len(nodes)
        mine = nodes[begin:end]
        sent = returned if final else [v for v in [*received, *mine] if v in last and last[v] >= end]
        carried = set(received)
        computed = [value for value in sent if value not in carried]
        read = {argument for node in mine for argument in node.all_input_nodes} | set(computed)
        inputs = [node for node in placeholders(graph) if node in read] + [value for value in received if value in read]
        attributes = [node for node in graph.find_nodes(op="get_attr") if node in read]
        stages.append(
            StageGraph(
                index=index,
                module=build_graph(module, inputs, [*attributes, *mine], computed, on_placeholder=_mark_received(position)),
                computes=tuple(node.name for node in computed),
                receives=tuple(node.name for node in received),
                sends=tuple(node.name for node in sent),
            )
        )
        received = sent
    return stages


def _mark_received(position: dict[fx.Node, int]) -> Callable[[fx.Node, fx.Node], None]:
    def mark(new: fx.Node, old: fx.Node) -> None:
        if old in position:
            new.meta["source"] = Source(SourceKind.RECEIVED, old.name)

    return mark
