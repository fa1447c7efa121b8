"""What a plan costs: time, bubbles and held activations, from the times of its actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .actions import Action, ActionKind
from .costs import Costs
from .memory import Memory
from .order import NONE, Links, link, run_order
from .plan import Plan
from .validate import check_complete

__all__ = ["Simulation", "TimelineEntry", "simulate"]


class TimelineEntry(NamedTuple):
    """An action and when it runs, in the unit of the costs, from the start of the simulation.

    Adjacent W that run as one share its time evenly.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found. Times are in the unit of the costs."""

    makespan: float
    """Global: from the first start to the last end, over all ranks."""
    longest_stage: float
    """The largest of: a rank's last end minus its own first start."""
    step_time: float
    """From the end of one step to the end of the next, when steps follow each other. With a barrier between them, for an
    optimizer that waits for all ranks, `makespan`. Without, each rank begins the next step when it has done its own."""
    bubble_ratio: float
    """1 - work / (ranks * makespan), where work is the sum of all actions' times; 0 if no action takes any time."""
    rank_bubble: tuple[float, ...]
    """The same for each rank by itself: 1 - work of the rank / makespan. Their mean is `bubble_ratio`."""
    peak_activations: tuple[float, ...]
    """For each rank, the most that it holds at once, in whole stages' micro-batches.

    A stage holds a micro-batch from its F until its B, or until its W where the backward is split. A whole stage is one
    rank's share of the model: where a plan has v stages for each rank, a micro-batch at one of them counts 1/v.
    """
    peak_memory: tuple[float, ...]
    """The same in bytes, if the costs have sizes: what is only needed for I is then freed after it. Else `peak_activations`."""
    plan: Plan = field(repr=False)
    """What was simulated."""
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    """For each rank, when its actions start, in order."""
    ends: tuple[tuple[float, ...], ...] = field(repr=False)
    """For each rank, when its actions end, in order."""
    _memory: Memory = field(repr=False)

    @cached_property
    def timeline(self) -> tuple[tuple[TimelineEntry, ...], ...]:
        """For each rank, its actions in order."""
        rows = zip(self.plan.ranks, self.starts, self.ends, strict=True)
        return tuple(tuple(map(TimelineEntry, *row)) for row in rows)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank, (time, held from then on) at each change, in the unit of `peak_memory`."""
        return tuple(
            tuple(
                (start if action.kind is ActionKind.F else end, level)
                for (action, start, end), level in zip(row, levels, strict=True)
            )
            for row, levels in zip(self.timeline, self._memory.levels(self.plan), strict=True)
        )

    @cached_property
    def critical_path(self) -> tuple[TimelineEntry, ...]:
        """Actions that follow each other without any slack, from the start to the last end.

        Each waits for the one before it: on its own rank, or for its value from another. To shorten the makespan, one of
        them, or the communication between two, must get shorter or move.
        """
        links = link(self.plan)
        makers = {value: (rank, at) for rank, row in enumerate(links.makes) for at, value in enumerate(row) if value != NONE}
        rank = max(range(len(self.ends)), key=lambda r: self.ends[r][-1])
        at = len(self.ends[rank]) - 1
        path = []
        while True:
            start = self.starts[rank][at]
            path.append(TimelineEntry(self.plan.ranks[rank][at], start, self.ends[rank][at]))
            if at and self.ends[rank][at - 1] == start:
                at -= 1
            elif links.needs[rank][at] != NONE:
                rank, at = makers[links.needs[rank][at]]
            else:
                return tuple(reversed(path))


def simulate(plan: Plan, costs: Costs | None = None, *, barrier: bool = True) -> Simulation:
    """Run `plan` on paper: each action starts as soon as its rank is free and the value it needs has arrived.

    `costs` defaults to unit times and free communication. The ranks run their rows in order; sends never block. `barrier`
    only says what `step_time` stands for. Takes time in proportion to the number of actions. Raises PlanError if the
    plan cannot run (see `validate`), and InputError if the costs are for another number of stages.
    """
    costs = costs or Costs()
    check_complete(plan)
    links = link(plan)
    order = run_order(plan, links)
    durations = [_durations(row, plan, costs) for row in plan.ranks]
    delays = _delays(plan, costs)
    starts, ends = _run(order, links, durations, delays, [0.0] * len(plan.ranks))

    last_end = max(row[-1] for row in ends)
    makespan = last_end - min(row[0] for row in starts)
    step_time = makespan
    if not barrier:
        _, next_ends = _run(order, links, durations, delays, [row[-1] for row in ends])
        step_time = max(row[-1] for row in next_ends) - last_end
    work = list(map(math.fsum, durations))
    peaks = Memory.of(plan, Costs()).peaks(plan)
    memory = Memory.of(plan, costs)
    return Simulation(
        makespan=makespan,
        longest_stage=max(row_ends[-1] - row_starts[0] for row_starts, row_ends in zip(starts, ends, strict=True)),
        step_time=step_time,
        bubble_ratio=1 - math.fsum(work) / (len(plan.ranks) * makespan) if makespan else 0.0,
        rank_bubble=tuple(1 - of_rank / makespan if makespan else 0.0 for of_rank in work),
        peak_activations=peaks,
        peak_memory=peaks if costs.saved is None else memory.peaks(plan),
        plan=plan,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        _memory=memory,
    )


def _durations(row: tuple[Action, ...], plan: Plan, costs: Costs) -> list[float]:
    """The time of each action of a rank; adjacent W of a stage, as many as run as one, share their time."""
    times = {
        ActionKind.F: costs.per_stage("forward", plan.stages),
        ActionKind.I: costs.per_stage("backward_input", plan.stages),
        ActionKind.B: costs.per_stage("backward", plan.stages),
    }
    batches = costs.batches(plan.stages)
    durations: list[float] = []
    while len(durations) < len(row):
        at = len(durations)
        action = row[at]
        if action.kind is not ActionKind.W:
            durations.append(times[action.kind][action.stage])
            continue
        batch = batches[action.stage]
        count = 1
        while count < len(batch) and at + count < len(row) and row[at + count].kind is ActionKind.W:
            if row[at + count].stage != action.stage:
                break
            count += 1
        durations += [batch[count - 1] / count] * count
    return durations


def _delays(plan: Plan, costs: Costs) -> list[tuple[float, float]]:
    """For each stage, the time from its output, and from its input's gradient, to the rank that needs it."""
    stages = plan.stages
    homes = [plan.rank_of_stage(stage) for stage in range(stages)]
    outputs, gradients = costs.comm_times(stages)
    return [
        (
            outputs[stage] if stage + 1 < stages and homes[stage] != homes[stage + 1] else 0.0,
            gradients[stage] if stage and homes[stage] != homes[stage - 1] else 0.0,
        )
        for stage in range(stages)
    ]


def _run(
    order: list[tuple[int, int]],
    links: Links,
    durations: Sequence[Sequence[float]],
    delays: Sequence[tuple[float, float]],
    free: list[float],
) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of all actions, by rank, with each rank free from `free[rank]` on; changes `free`."""
    starts: list[list[float]] = [[] for _ in durations]
    ends: list[list[float]] = [[] for _ in durations]
    values = 1 + max(map(max, links.makes))
    microbatches = values // 2 // len(delays)
    arrived = [0.0] * values
    for rank, position in order:
        start = free[rank]
        needed = links.needs[rank][position]
        if needed != NONE and arrived[needed] > start:
            start = arrived[needed]
        end = start + durations[rank][position]
        value = links.makes[rank][position]
        if value != NONE:
            arrived[value] = end + delays[value // 2 // microbatches][value % 2]
        free[rank] = end
        starts[rank].append(start)
        ends[rank].append(end)
    return starts, ends
