"""What the split did, as tables for a terminal some 125 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from tabulate import SEPARATING_LINE, tabulate

from ..program import GRAPH_NAMES, StageProgram
from ..schedules import Plan
from .describe import (
    LETTERS,
    EarlyGradient,
    NodeRow,
    PerGraph,
    StageSummary,
    TensorType,
    early_gradients,
    graph_names,
    node_rows,
    stage_program,
    summarize,
    total_of,
)
from .text import bytes_text, count_text, plural

if TYPE_CHECKING:
    from ..api import Pipe

_MODULES_WIDTH = 41
_WIDTHS = {"op": 22, "name": 16, "value": 16, "where": 13, "module or key": 20, "source": 13, "arguments, role": 18}
_TITLES = {
    "forward": "F, forward",
    "backward_input": "I, backward-input: gradients for the stage before",
    "backward_weight": "W, backward-weight: gradients of the parameters",
    "backward": "B, full backward: I and W in one",
}


def print_split(pipe: Pipe, *, stage: int | None = None, graph: str | None = None, file: TextIO | None = None) -> None:
    """Print what the split did, as tables.

    stage: None for the numbers of all stages, for one micro-batch: the modules a stage covers, operations and FLOPs of
        F, I, W and B, bytes saved, freed after I, held for W, and sent on. A stage's index for its graphs instead: each
        operation with its module and source line, and whether I runs it, W runs it, or I runs it and stashes the
        result for W; then the parameter gradients that I computes, and why.
    graph: of that stage only "forward", "input", "weight" or "backward" ("backward_input", "backward_weight" and the
        letters F, I, W, B mean the same).
    file: where to print; sys.stdout by default.
    Raises InputError for an unknown stage or graph, and if nothing has been captured yet.
    `twobp_fx.inspect.describe_split` returns the same as data.
    """
    names = graph_names(stage, graph)
    programs = pipe.stages
    text = _overview(programs, pipe.plan) if stage is None else _stage(stage_program(programs, stage), names)
    print(text, file=file)


def _overview(programs: Sequence[StageProgram], plan: Plan) -> str:
    summaries = summarize(programs)
    total = total_of(summaries)
    letters = [LETTERS[name] for name in GRAPH_NAMES]

    def work_row(label: str, summary: StageSummary) -> list[str]:
        modules = summary.modules.removeprefix("modules ").removeprefix("module ")
        if len(modules) > _MODULES_WIDTH:
            modules = modules.replace(" to ", "\nto ")
        return [label, modules, *map(str, _four(summary.nodes)), *map(count_text, _four(summary.flops))]

    def memory_row(label: str, summary: StageSummary) -> list[str]:
        sizes = (summary.saved, summary.freed_after_input, summary.held_for_weight, summary.sent)
        return [label, *map(bytes_text, sizes)]

    work = _totalled(summaries, total, work_row)
    memory = _totalled(summaries, total, memory_row)
    return "\n".join(
        [
            f"{plural(len(programs), 'stage')}, plan '{plan.name}': {plural(len(plan.ranks), 'rank')}, "
            f"{plural(plan.microbatches, 'micro-batch')}. All numbers are for one micro-batch.",
            "",
            "Work: operations, and floating-point operations",
            tabulate(
                work,
                headers=["stage", "modules", *(f"{x} ops" for x in letters), *(f"{x} FLOPs" for x in letters)],
                colalign=["right", "left", *["right"] * 8],
                maxcolwidths=[None, _MODULES_WIDTH, *[None] * 8],
                disable_numparse=True,
            ),
            "",
            "Memory: what a stage holds besides parameters and buffers, and what it sends on",
            tabulate(
                memory,
                headers=["stage", "saved by F", "freed after I", "held for W (stash included)", "sent to next stage"],
                colalign=["right"] * 5,
                disable_numparse=True,
            ),
            *_early_summary(summaries),
        ]
    )


def _totalled(
    summaries: Sequence[StageSummary], total: StageSummary, row: Callable[[str, StageSummary], list[str]]
) -> list[list[str]]:
    rows = [row(str(summary.index), summary) for summary in summaries]
    return [*rows, [SEPARATING_LINE], row("all", total)]


def _four(numbers: PerGraph) -> list[int]:
    return [getattr(numbers, name) for name in GRAPH_NAMES]


def _early_summary(summaries: Sequence[StageSummary]) -> list[str]:
    counts = [(summary.index, len(summary.early_gradients)) for summary in summaries if summary.early_gradients]
    if not counts:
        return []
    stages = ", ".join(f"stage {index}: {count}" for index, count in counts)
    return ["", f"Parameter gradients computed in I ({stages}). Print one stage to see which, and why."]


def _stage(program: StageProgram, names: Sequence[str]) -> str:
    lines = [f"Stage {program.index}: {program.modules}"]
    for name in names:
        rows = node_rows(program, name)
        count = sum(row.kind == "operation" for row in rows)
        lines += ["", f"{_TITLES[name]} ({plural(count, 'operation')})"]
        if rows:
            lines.append(tabulate(list(map(_cells, rows)), headers=list(_WIDTHS), stralign="left", disable_numparse=True))
    if early := early_gradients(program):
        lines += ["", "Parameter gradients computed in I:", *_early_lines(early)]
    return "\n".join(lines)


def _early_lines(early: Sequence[EarlyGradient]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for gradient in early:
        reason = gradient.reason if gradient.operator is None else f"{gradient.reason} {gradient.operator}"
        by_reason.setdefault(reason, []).append(gradient.parameter)
    return [f"    {parameter}  ({reason})" for reason, parameters in by_reason.items() for parameter in parameters]


def _cells(row: NodeRow) -> list[str]:
    where = ", ".join([*row.where, *(["recomputed"] if row.recomputed else []), *(["stashed"] if row.stashed else [])])
    cells = [
        row.operator.removeprefix("aten.").removesuffix(".default") or row.kind,
        row.name,
        _value_text(row.tensors),
        where,
        row.key if row.key not in ("", row.name) else row.module,
        row.source.replace("\\", "/").rpartition("/")[2],
        row.role or row.arguments,
    ]
    end = ("op", "value", "where", "arguments, role")
    return [
        _shorten(cell, width, keep="start" if column in end else "both" if column == "name" else "end")
        for cell, (column, width) in zip(cells, _WIDTHS.items(), strict=True)
    ]


def _value_text(tensors: Sequence[TensorType]) -> str:
    """`f32[4,128]`, as torch writes types; in parentheses if there are several."""
    shown = [f"{_short_dtype(tensor.dtype)}[{','.join(map(str, tensor.shape))}]" for tensor in tensors]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})" if shown else ""


def _short_dtype(name: str) -> str:
    for kind, letter in {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}.items():
        if name.startswith(kind):
            return letter + name.removeprefix(kind)
    return name


def _shorten(text: str, width: int, *, keep: str) -> str:
    """`text` in at most `width` characters: its start, its end, or both of them, and an ellipsis."""
    if len(text) <= width:
        return text
    if keep == "start":
        return text[: width - 1] + "…"
    if keep == "end":
        return "…" + text[1 - width :]
    head = (width - 1) // 2
    return text[:head] + "…" + text[head + 1 - width :]
