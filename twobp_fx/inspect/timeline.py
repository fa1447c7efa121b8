"""A plan's timeline, drawn for a terminal some 125 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from tabulate import tabulate

from ..schedules import Costs, Plan, Simulation, TimelineEntry, simulate
from .text import bytes_text, plural

__all__ = ["print_plan"]

_WIDTH = 88


def print_plan(plan: Plan, costs: Costs | None = None, *, file: TextIO | None = None) -> None:
    """Print each rank's actions on a common time axis, to scale, with its bubble and its peak memory beside it.

    costs: what to simulate with. The whole step is then drawn in 88 columns: an action where there is room as its text
        (`2F0--`), else as its letter, in lower case at every second stage of a rank; a dot is idle time. Peaks are in
        bytes if the costs have sizes, else in whole stages' micro-batches.
        None: equal times, F = I = W = 1 unit, B = 2, free communication; every action is then written out, a unit of
        time a slot, in as many lines as it takes.
    file: where to print; sys.stdout by default.
    Raises PlanError if the plan cannot run, and InputError if the costs are for another number of stages.
    """
    sim = simulate(plan, costs)
    if costs is None:
        drawn = _unit_slots(plan, sim)
        how = "; simulated at F = I = W = 1, B = 2, free communication."
    else:
        drawn = [_to_scale(row, sim.makespan) for row in sim.timeline]
        how = f". A column is {sim.makespan / _WIDTH:.3g} of the costs' unit of time."
    sized = costs is not None and costs.saved is not None
    peaks = [bytes_text(round(peak)) if sized else f"{peak:.4g}" for peak in sim.peak_memory]
    table = tabulate(
        [[str(rank), *cells] for rank, cells in enumerate(zip(drawn, _percent(sim.rank_bubble), peaks, strict=True))],
        headers=["rank", "actions", "bubble", "peak"],
        colalign=["right", "left", "right", "right"],
        disable_numparse=True,
    )
    most = peaks[sim.peak_memory.index(max(sim.peak_memory))]
    lines = [
        f"Plan '{plan.name}': {plural(len(plan.ranks), 'rank')}, {plural(plan.stages, 'stage')}, "
        f"{plural(plan.microbatches, 'micro-batch')}{how}",
        "",
        table,
        "",
        f"makespan {sim.makespan:g}, longest rank {sim.longest_stage:g}, bubble {sim.bubble_ratio:.1%}, "
        f"peak {most}{'' if sized else ' (micro-batches of a whole stage)'}",
    ]
    print("\n".join(lines), file=file)


def _percent(ratios: Sequence[float]) -> list[str]:
    return [f"{ratio:.1%}" for ratio in ratios]


def _unit_slots(plan: Plan, sim: Simulation) -> list[str]:
    """Every action written out, at equal times; lines are folded at the same times on all ranks."""
    width = max(len(str(action)) for row in plan.ranks for action in row)
    units = round(sim.makespan)
    a_line = max(1, _WIDTH // (width + 1))
    drawn = []
    for entries in sim.timeline:
        slots = ["."] * units
        for action, start, end in entries:
            first, last = round(start), round(end)
            slots[first:last] = [str(action), *["-" * width] * (last - first - 1)]
        lines = [slots[i : i + a_line] for i in range(0, units, a_line)]
        drawn.append("\n".join(" ".join(f"{slot:<{width}}" for slot in line) for line in lines))
    return drawn


def _to_scale(row: Sequence[TimelineEntry], makespan: float) -> str:
    """One line; what takes less than half a column may not show."""
    lower = sorted({entry.action.stage for entry in row})[1::2]
    columns = ["."] * _WIDTH
    for action, start, end in row:
        first, last = (round(time / makespan * _WIDTH) if makespan else 0 for time in (start, end))
        room = last - first
        if room > 0:
            letter = action.kind.lower() if action.stage in lower else str(action.kind)
            text = str(action) if room > len(str(action)) else letter
            columns[first:last] = f"{text:-<{room}}"
    return "".join(columns)
