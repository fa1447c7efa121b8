"""What a plan costs: time, bubbles and held activations, from the times of its actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import NamedTuple

from ..errors import InputError
from .actions import Action, ActionKind
from .order import Value, execution_order, value_made, value_needed
from .plan import Plan
from .validate import validate

__all__ = ["Costs", "Simulation", "TimelineEntry", "simulate"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of the actions, all in one unit of the caller's choice: each a number, or a sequence with one a stage.

    `backward` is the time of B; None stands for `backward_input + backward_weight`. `comm` is the time that a value
    takes to another rank, the sequence's entry being that of the stage it leaves. It delays the receiver and occupies
    neither rank; between stages of one rank there is none. Raises InputError for a time that is negative or not finite.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None
    comm: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "backward":
                continue
            times = tuple(value) if isinstance(value, Sequence) else (value,)
            if not all(map(_is_time, times)):
                raise InputError(f"Costs.{field.name} is {value!r}; times must be numbers, finite and at least 0")
            if isinstance(value, Sequence):
                object.__setattr__(self, field.name, times)  # a list changed later then changes nothing here

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """The times in the field `name`, one for each of `stages` stages.

        Raises InputError if the field is a sequence of another length.
        """
        value = getattr(self, name)
        if value is None:
            parts = zip(self.per_stage("backward_input", stages), self.per_stage("backward_weight", stages), strict=True)
            return tuple(i + w for i, w in parts)
        if not isinstance(value, tuple):
            return (float(value),) * stages
        if len(value) != stages:
            raise InputError(f"Costs.{name} has {len(value)} entries, but the plan has {stages} stages; give one a stage")
        return tuple(map(float, value))


class TimelineEntry(NamedTuple):
    """An action and when it runs, in the unit of the costs, from the start of the simulation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` found. Times are in the unit of the costs."""

    makespan: float
    """Global: from the first start to the last end, over all ranks."""
    longest_stage: float
    """The largest of: a rank's last end minus its own first start."""
    bubble_ratio: float
    """1 - work / (ranks * makespan), where work is the sum of all actions' times; 0 if no action takes any time."""
    rank_bubble: tuple[float, ...]
    """The same for each rank by itself: 1 - work of the rank / makespan. Their mean is `bubble_ratio`."""
    peak_activations: tuple[float, ...]
    """For each rank, the most that it holds at once, in whole stages' micro-batches.

    A stage holds a micro-batch from its F until its B, or until its W where the backward is split. A whole stage is one
    rank's share of the model: where a plan has v stages for each rank, a micro-batch at one of them counts 1/v.
    """
    timeline: tuple[tuple[TimelineEntry, ...], ...]
    """For each rank, its actions in order."""


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Run `plan` on paper: each action starts as soon as its rank is free and the value it needs has arrived.

    `costs` defaults to unit times and free communication. The ranks run their rows in order; sends never block. Takes
    time in proportion to the number of actions. Raises PlanError if the plan cannot run (see `validate`), and
    InputError if the costs are for another number of stages.
    """
    costs = costs or Costs()
    validate(plan)
    timeline = _timeline(plan, costs)

    ranks = len(plan.ranks)
    makespan = max(row[-1].end for row in timeline) - min(row[0].start for row in timeline)
    work = [math.fsum(entry.end - entry.start for entry in row) for row in timeline]
    return Simulation(
        makespan=makespan,
        longest_stage=max(row[-1].end - row[0].start for row in timeline),
        bubble_ratio=1 - math.fsum(work) / (ranks * makespan) if makespan else 0.0,
        rank_bubble=tuple(1 - of_rank / makespan if makespan else 0.0 for of_rank in work),
        peak_activations=tuple(_peak(row) * ranks / plan.stages for row in plan.ranks),
        timeline=timeline,
    )


def _timeline(plan: Plan, costs: Costs) -> tuple[tuple[TimelineEntry, ...], ...]:
    stages = plan.stages
    times = {
        ActionKind.F: costs.per_stage("forward", stages),
        ActionKind.I: costs.per_stage("backward_input", stages),
        ActionKind.W: costs.per_stage("backward_weight", stages),
        ActionKind.B: costs.per_stage("backward", stages),
    }
    comm = costs.per_stage("comm", stages)
    home = [plan.rank_of_stage(stage) for stage in range(stages)]

    timeline: list[list[TimelineEntry]] = [[] for _ in plan.ranks]
    made_at: dict[Value, float] = {}
    free_at = [0.0] * len(plan.ranks)
    for rank, action in execution_order(plan):
        start = free_at[rank]
        needed = value_needed(action, stages)
        if needed is not None:
            delay = comm[needed.stage] if home[needed.stage] != rank else 0.0
            start = max(start, made_at[needed] + delay)
        end = start + times[action.kind][action.stage]
        value = value_made(action)
        if value is not None:
            made_at[value] = end
        free_at[rank] = end
        timeline[rank].append(TimelineEntry(action, start, end))
    return tuple(map(tuple, timeline))


def _peak(row: tuple[Action, ...]) -> int:
    held = peak = 0
    for action in row:
        if action.kind == ActionKind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind in (ActionKind.W, ActionKind.B):
            held -= 1
    return peak


def _is_time(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value) and float(value) >= 0
