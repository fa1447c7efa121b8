"""Proof that a plan can run."""

from __future__ import annotations

from itertools import pairwise

from ..errors import PlanError
from .actions import ActionKind
from .order import execution_order
from .plan import Plan

__all__ = ["validate"]

F, I, W, B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B

_Positions = dict[tuple[int, int], dict[ActionKind, int]]
"""(stage, micro-batch) -> kind -> position in the row of the stage's rank."""


def validate(plan: Plan) -> None:
    """Return if every rank can run its row of `plan` to the end, and all work is then done; else raise PlanError.

    - Every rank has an action; the stages are 0 to n - 1, each on one rank.
    - Every stage has, for every micro-batch of the plan, one F, and either one B or one I and one W.
    - On its rank, F comes before I or B, and I before W.
    - No deadlock when every rank runs its row in order and blocks until a value that it needs has been received.

    The message names the actions and the rank in conflict, positions counted from 0. Takes time in proportion to the
    number of actions.
    """
    _check_placement(plan)
    positions = _locate(plan)
    for stage in range(plan.stages):
        for microbatch in range(plan.microbatches):
            _check_microbatch(plan, stage, microbatch, positions.get((stage, microbatch), {}))
    execution_order(plan)


def _check_placement(plan: Plan) -> None:
    stages = set()
    for rank, row in enumerate(plan.ranks):
        if not row:
            raise PlanError(f"plan {plan.name!r}: rank {rank} has no action; use fewer ranks")
        for action in row:
            home = plan.rank_of_stage(action.stage)
            if home != rank:
                first = next(a for a in plan.ranks[home] if a.stage == action.stage)
                raise PlanError(
                    f"plan {plan.name!r}: stage {action.stage} is on two ranks: {first} is on rank {home}, {action} on "
                    f"rank {rank}; move all of a stage's actions to one rank"
                )
            stages.add(action.stage)
    if len(stages) != plan.stages:
        missing = next(stage for stage in range(plan.stages) if stage not in stages)
        raise PlanError(
            f"plan {plan.name!r}: there is a stage {plan.stages - 1} but no stage {missing}; number the stages from 0 without a gap"
        )


def _locate(plan: Plan) -> _Positions:
    positions: _Positions = {}
    for rank, row in enumerate(plan.ranks):
        for position, action in enumerate(row):
            kinds = positions.setdefault((action.stage, action.microbatch), {})
            if action.kind in kinds:
                raise PlanError(
                    f"plan {plan.name!r}: rank {rank} runs {action} twice, at positions {kinds[action.kind]} and "
                    f"{position}; remove one"
                )
            kinds[action.kind] = position
    return positions


def _check_microbatch(plan: Plan, stage: int, microbatch: int, kinds: dict[ActionKind, int]) -> None:
    def fail(problem: str) -> PlanError:
        return PlanError(f"plan {plan.name!r}, rank {plan.rank_of_stage(stage)}: {problem}")

    def text(kind: ActionKind) -> str:
        return f"{stage}{kind}{microbatch}"

    if F not in kinds:
        raise fail(f"{text(F)} is missing; every stage runs one F for each of {plan.microbatches} micro-batches")
    if B in kinds and (I in kinds or W in kinds):
        other = I if I in kinds else W
        raise fail(f"{text(B)} and {text(other)} exclude each other; keep either B, or I and W")
    if B not in kinds and I not in kinds and W not in kinds:
        raise fail(f"{text(F)} has no backward; add {text(B)}, or {text(I)} and {text(W)}")
    if B not in kinds and I not in kinds:
        raise fail(f"{text(W)} has no {text(I)}; add it before {text(W)}")
    if B not in kinds and W not in kinds:
        raise fail(f"{text(I)} has no {text(W)}; add it after {text(I)}")
    chain = (F, B) if B in kinds else (F, I, W)
    for earlier, later in pairwise(chain):
        if kinds[earlier] > kinds[later]:
            raise fail(
                f"{text(later)} at position {kinds[later]} comes before {text(earlier)} at position {kinds[earlier]}, "
                "which it needs; swap them"
            )
