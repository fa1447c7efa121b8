"""What the split did to each stage, as data: node counts, FLOPs, bytes, and the graphs node by node.

Counts and FLOPs are of operations (`passes.graph.operations`): everything a graph runs, none of what it takes or
returns. FLOPs follow torch's own formulas (`passes.costs`). Bytes are of one micro-batch (`program.StageMemory`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..errors import InputError
from ..passes.costs import total_flops
from ..passes.graph import (
    aliased_arguments,
    ancestors,
    module_fqn,
    operations,
    outputs,
    placeholders,
    source_line,
    tensors,
    written_arguments,
)
from ..passes.partition_joint import RECOMPUTED
from ..program import GRAPH_NAMES, Role, StageGraphs, StageProgram, Value

if TYPE_CHECKING:
    from ..api import Pipe

LETTERS = dict(zip(GRAPH_NAMES, "FIWB", strict=True))
"""The letter of each graph, as in the actions of a plan."""

_ALIASES = {
    **{name: name for name in GRAPH_NAMES},
    **{letter: name for name, letter in LETTERS.items()},
    "input": "backward_input",
    "weight": "backward_weight",
}

FUSED = "fused operator"
NEEDED = "needed by an input gradient"
EFFECT = "needed by an operation with an effect"


@dataclass(frozen=True, slots=True)
class PerGraph:
    """One number for each of a stage's four graphs."""

    forward: int
    backward_input: int
    backward_weight: int
    backward: int


@dataclass(frozen=True, slots=True)
class EarlyGradient:
    """A parameter's gradient that I computes.

    `reason` is FUSED, NEEDED or EFFECT; `operator` the fused operator's name, None for the other reasons.
    """

    parameter: str
    reason: str
    operator: str | None


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage in numbers. Bytes are of one micro-batch; `sent` counts the activations sent to the next stage."""

    index: int
    modules: str
    nodes: PerGraph
    flops: PerGraph
    saved: int
    freed_after_input: int
    held_for_weight: int
    sent: int
    early_gradients: tuple[EarlyGradient, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype (`float32`) of one tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node of a stage's graph, or one of the values that the graph returns.

    kind:       "placeholder", "attribute", "operation" or "output".
    operator:   what an operation calls, such as `aten.mm.default`; '' for the others.
    role, key:  of a placeholder or output, by the calling convention (`program.Value`); '' for the others.
    where:      F, I or W: what runs the operation. Of a placeholder, which of I and W take it; of an output, which of
                them computes it or, of a value that F saves, take it.
    stashed:    I computes it and hands it to W.
    recomputed: F computed it too, and the backward computes it again rather than keep it.
    tensors:    one entry for a tensor, several for a tuple.
    source:     `file:line` of the Python code it comes from.
    """

    name: str
    kind: str
    operator: str
    role: str
    key: str
    where: tuple[str, ...]
    stashed: bool
    recomputed: bool
    tensors: tuple[TensorType, ...]
    module: str
    source: str
    arguments: str


def describe_split(pipe: Pipe, *, stage: int | None = None, graph: str | None = None, graphs: bool = False) -> dict[str, Any]:
    """What `print_split` prints, as plain data for `json.dumps`: dictionaries, lists, strings, numbers, None.

    Keys: `plan` (name, ranks, microbatches), `stages` (a `StageSummary` for each, as a dictionary), and `total` (their
    sums, over all stages). With `graphs=True`, or where `stage` names one, each stage also has `graphs`: a list of
    `NodeRow`s for each graph's name.
    stage, graph: only this stage, only this graph of it; as in `print_split`.
    Raises InputError for an unknown stage or graph, and if nothing has been captured yet.
    """
    names = graph_names(stage, graph)
    programs = pipe.stages
    chosen = programs if stage is None else (stage_program(programs, stage),)
    summaries = summarize(programs)
    stages = []
    for program in chosen:
        entry = asdict(summaries[program.index])
        if graphs or stage is not None:
            entry["graphs"] = {name: [asdict(row) for row in node_rows(program, name)] for name in names}
        stages.append(entry)
    plan = pipe.plan
    result = {
        "plan": {"name": plan.name, "ranks": len(plan.ranks), "microbatches": plan.microbatches},
        "stages": stages,
        "total": _totals(summaries),
    }
    plain: dict[str, Any] = _plain(result)
    return plain


def _plain(value: Any) -> Any:
    """The same with lists for tuples: equal to what JSON gives back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _totals(summaries: Sequence[StageSummary]) -> dict[str, Any]:
    total = asdict(total_of(summaries))
    return {key: total[key] for key in ("nodes", "flops", "saved", "freed_after_input", "held_for_weight", "sent")}


def stage_program(programs: Sequence[StageProgram], stage: int) -> StageProgram:
    """The program of that stage. Raises InputError if there is none."""
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < len(programs):
        exist = "the only stage is 0" if len(programs) == 1 else f"the stages are 0 to {len(programs) - 1}"
        raise InputError(f"There is no stage {stage!r}: {exist}.")
    return programs[stage]


def graph_names(stage: int | None, graph: str | None) -> tuple[str, ...]:
    """The graphs meant by `graph`, all four if it is None.

    Raises InputError for an unknown one, and if a graph is named but no stage.
    """
    if graph is None:
        return GRAPH_NAMES
    if graph not in _ALIASES:
        raise InputError(
            f"There is no graph {graph!r}. A stage's graphs are 'forward' (F), 'input' (I), 'weight' (W) and 'backward' (B)."
        )
    if stage is None:
        raise InputError(f"graph={graph!r} needs a stage: say which stage's graph with stage=.")
    return (_ALIASES[graph],)


def summarize(programs: Sequence[StageProgram]) -> tuple[StageSummary, ...]:
    """Each stage in numbers."""
    sizes = {
        value.key: value.nbytes
        for program in programs
        for value in program.signatures["forward"].returns
        if value.role is Role.SENT
    }
    return tuple(
        StageSummary(
            index=program.index,
            modules=program.modules,
            nodes=PerGraph(*(len(operations(module.graph)) for _, module in program.graphs.items())),
            flops=PerGraph(*(total_flops(operations(module.graph)) for _, module in program.graphs.items())),
            saved=program.memory.saved,
            freed_after_input=program.memory.freed_after_input,
            held_for_weight=program.memory.held_for_weight,
            sent=sum(sizes[name] for name in program.sends) if program is not programs[-1] else 0,
            early_gradients=early_gradients(program),
        )
        for program in programs
    )


def total_of(summaries: Sequence[StageSummary]) -> StageSummary:
    """All stages together, as one."""

    def add(numbers: Iterable[PerGraph]) -> PerGraph:
        rows = list(numbers)
        return PerGraph(*(sum(getattr(row, name) for row in rows) for name in GRAPH_NAMES))

    return StageSummary(
        index=-1,
        modules="",
        nodes=add(summary.nodes for summary in summaries),
        flops=add(summary.flops for summary in summaries),
        saved=sum(summary.saved for summary in summaries),
        freed_after_input=sum(summary.freed_after_input for summary in summaries),
        held_for_weight=sum(summary.held_for_weight for summary in summaries),
        sent=sum(summary.sent for summary in summaries),
        early_gradients=tuple(gradient for summary in summaries for gradient in summary.early_gradients),
    )


def early_gradients(program: StageProgram) -> tuple[EarlyGradient, ...]:
    """The parameter gradients that I computes and W only hands out (as they are, or as a view), with the reason."""
    graph = program.graphs.backward_input.graph
    returns = program.signatures["backward_input"].returns
    stashed = {value.name for value in returns if value.role is Role.STASH}
    computed = {node.name: node for node in operations(graph) if node.name in stashed}
    needed = ancestors(node for node, value in zip(outputs(graph), returns, strict=True) if value.role is not Role.STASH)
    early = []
    weight = program.graphs.backward_weight.graph
    for node, value in zip(outputs(weight), program.signatures["backward_weight"].returns, strict=True):
        source = computed.get(_behind_views(node).name)
        if source is None:
            continue
        if source in needed:
            early.append(EarlyGradient(value.key, NEEDED, None))
        elif source.target is operator.getitem:
            early.append(EarlyGradient(value.key, FUSED, operator_name(source.all_input_nodes[0])))
        else:
            early.append(EarlyGradient(value.key, EFFECT, None))
    return tuple(early)


def _behind_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and not written_arguments(node) and (viewed := aliased_arguments(node)):
        node = viewed[0]
    return node


def node_rows(program: StageProgram, name: str) -> list[NodeRow]:
    """The graph of that name (one of GRAPH_NAMES), node by node: what it takes, what it runs, what it returns."""
    graph: fx.Graph = getattr(program.graphs, name).graph
    signature = program.signatures[name]
    halves = _Halves(program.graphs)
    takes = dict(zip(placeholders(graph), signature.takes, strict=True))
    rows = []
    for node in graph.nodes:
        if node.op == "placeholder":
            rows.append(_end_row(node, takes[node], "placeholder", halves.taking(node.name), stashed=False))
        elif node.op != "output":
            where = ("F",) if name == "forward" else halves.running(node.name)
            kind = "attribute" if node.op == "get_attr" else "operation"
            rows.append(_operation_row(node, kind, where, name != "forward" and node.name in halves.stash))
    for node, value in zip(outputs(graph), signature.returns, strict=True):
        if name == "forward":
            rows.append(_end_row(node, value, "output", halves.taking(value.name), stashed=False))
        else:
            where = halves.running(value.name) or halves.taking(value.name)
            rows.append(_end_row(node, value, "output", where, stashed=value.name in halves.stash))
    return rows


class _Halves:
    """Which of I and W runs a node, and which take a value: by name, which is the same in all graphs of a stage."""

    def __init__(self, graphs: StageGraphs) -> None:
        halves = {"I": graphs.backward_input.graph, "W": graphs.backward_weight.graph}
        self._run = {
            half: {node.name for node in half_graph.nodes if node.op not in ("placeholder", "output")}
            for half, half_graph in halves.items()
        }
        self._taken = {half: {node.name for node in placeholders(half_graph)} for half, half_graph in halves.items()}
        self.stash = self._run["I"] & self._taken["W"]

    def running(self, name: str) -> tuple[str, ...]:
        return tuple(half for half, names in self._run.items() if name in names)

    def taking(self, name: str) -> tuple[str, ...]:
        return tuple(half for half, names in self._taken.items() if name in names)


def _end_row(node: fx.Node, value: Value, kind: str, where: tuple[str, ...], *, stashed: bool) -> NodeRow:
    return NodeRow(
        name=value.name,
        kind=kind,
        operator="",
        role=value.role.value,
        key=value.key,
        where=where,
        stashed=stashed,
        recomputed=bool(node.meta.get(RECOMPUTED)),
        tensors=(TensorType(value.shape, dtype_name(value.dtype)),),
        module=module_fqn(node),
        source=source_line(node),
        arguments="",
    )


def _operation_row(node: fx.Node, kind: str, where: tuple[str, ...], stashed: bool) -> NodeRow:
    return NodeRow(
        name=node.name,
        kind=kind,
        operator=operator_name(node) if kind == "operation" else "",
        role="",
        key=str(node.target) if kind == "attribute" else "",
        where=where,
        stashed=stashed,
        recomputed=bool(node.meta.get(RECOMPUTED)),
        tensors=tuple(
            TensorType(tuple(int(size) for size in tensor.shape), dtype_name(tensor.dtype))
            for tensor in tensors(node.meta.get("val"))
        ),
        module=module_fqn(node),
        source=source_line(node),
        arguments=_arguments(node),
    )


def operator_name(node: fx.Node) -> str:
    """What a node calls: `aten.mm.default`, `getitem`."""
    target = node.target
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return str(getattr(target, "__name__", target))


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _arguments(node: fx.Node) -> str:
    shown = [_argument(argument) for argument in node.args]
    return ", ".join([*shown, *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())])


def _argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_argument, value)) + "]"
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
