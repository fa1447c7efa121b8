"""What a rank holds while it runs its row: saved by F until I, held for W until W."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .actions import Action, ActionKind
from .costs import Costs
from .plan import Plan

__all__ = ["Memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """What one micro-batch holds at each stage, `saved` from F's start until I or B, `held` from I's end until W's.

    `scale` turns these into the unit that is reported: bytes, or whole stages' micro-batches, which are so counted
    in whole numbers until the end.
    """

    saved: tuple[float, ...]
    held: tuple[float, ...]
    scale: float

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Memory:
        """In bytes if `costs` has sizes, else in whole stages' micro-batches: a stage is ranks / stages of a rank's share."""
        scale = 1.0 if costs.saved is not None else len(plan.ranks) / plan.stages
        return cls(costs.per_stage("saved", plan.stages), costs.per_stage("held_for_weight", plan.stages), scale)

    def levels(self, plan: Plan) -> tuple[tuple[float, ...], ...]:
        """For each rank, what it holds after each of its actions has changed that: F at its start, the others at their end."""
        return tuple(tuple(level * self.scale for level in self._counted(row)) for row in plan.ranks)

    def peaks(self, plan: Plan) -> tuple[float, ...]:
        """For each rank, the most that it holds at once."""
        return tuple(max(self._counted(row)) * self.scale for row in plan.ranks)

    def _counted(self, row: tuple[Action, ...]) -> Iterator[float]:
        """The levels before scaling."""
        saved, held = self.saved, self.held
        level = 0.0
        for action in row:
            stage, kind = action.stage, action.kind
            if kind is ActionKind.F:
                level += saved[stage]
            elif kind is ActionKind.I:
                level += held[stage] - saved[stage]
            elif kind is ActionKind.W:
                level -= held[stage]
            else:
                level -= saved[stage]
            yield level
