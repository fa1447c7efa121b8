"""What is asked of the automatic schedule, with all times and caps written out for every stage and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..actions import Action, ActionKind
from ..placement import Placement
from ..plan import Plan

__all__ = ["F", "I", "Problem", "Step", "W", "in_order", "plan_of_steps"]

F, I, W = 0, 1, 2
"""Kinds of steps, as indices: the schedulers' inner loops look times and counts up by them."""

_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)

Step = tuple[int, int]
"""(kind, stage). The micro-batch is the next one of that kind at that stage: micro-batches stay in order everywhere.

They are all alike, so that order costs nothing: at any stage, the k-th F (I, W) of a plan may as well be called that of
micro-batch k.
"""


@dataclass(frozen=True)
class Problem:
    """A pipeline to schedule. Times are in the unit of the costs; one entry a stage unless said otherwise."""

    placement: Placement
    microbatches: int
    times: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """Of F, I and W; of a W that runs by itself."""
    weight_batches: tuple[tuple[float, ...], ...]
    """For each stage, what the first, second, ... of adjacent W adds to the time of those before it. Then the first again."""
    fused: tuple[float, ...]
    """Time of B."""
    delays: tuple[tuple[float, ...], tuple[float, ...]]
    """For F and for I: how long what a stage makes is under way to the stage that takes it (0 on the same rank)."""
    saved: tuple[float, ...]
    """What a micro-batch holds from the start of its F to the end of its I."""
    held: tuple[float, ...]
    """What it holds from there to the end of its W. Both in the unit of `memory_cap`."""
    memory_cap: tuple[float, ...]
    """One entry a rank."""
    barrier: bool
    """Whether the time to minimise is the global makespan; if not, the longest stage."""

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.memory_cap)

    @property
    def stages(self) -> int:
        """How many stages, over all ranks."""
        return self.placement.stages

    @property
    def chunks(self) -> int:
        """How many stages a rank holds."""
        return self.stages // self.ranks

    @property
    def actions(self) -> int:
        """How many actions a split plan has."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Each rank's stages, in the order in which the forward passes through them."""
        return tuple(map(self.placement.stages_of_rank, range(self.ranks)))

    @cached_property
    def capacity(self) -> tuple[float, ...]:
        """The caps, a little larger, against rounding."""
        return tuple(cap * (1 + 1e-9) for cap in self.memory_cap)


def plan_of_steps(rows: Sequence[Sequence[Step]]) -> Plan:
    """The plan whose ranks take `rows`' steps, micro-batches in order."""
    counts: dict[Step, int] = {}
    ranks = []
    for row in rows:
        actions = []
        for step in row:
            kind, stage = step
            actions.append(Action(stage, _KINDS[kind], counts.setdefault(step, 0)))
            counts[step] += 1
        ranks.append(tuple(actions))
    return Plan("auto", tuple(ranks))


def in_order(plan: Plan) -> Plan | None:
    """The same plan with W numbered in order; None if it has any B, or F or I of micro-batches out of order."""
    rows = []
    counts: dict[Step, int] = {}
    for row in plan.ranks:
        steps = []
        for action in row:
            if action.kind == ActionKind.B:
                return None
            step = _KINDS.index(action.kind), action.stage
            if action.kind != ActionKind.W and action.microbatch != counts.setdefault(step, 0):
                return None
            counts[step] = counts.get(step, 0) + 1
            steps.append(step)
        rows.append(steps)
    return plan_of_steps(rows)
