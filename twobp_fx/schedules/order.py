"""The dependencies between actions, and an order of all ranks' actions that respects them.

With each rank's order fixed, and F before I or B before W on every rank, one kind of dependency is left: the value that
a stage receives from its neighbour. F of stage s takes the output of F of stage s - 1; I and B of stage s take the
gradient that I or B of stage s + 1 makes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..errors import PlanError
from .actions import Action, ActionKind
from .plan import Plan

__all__ = ["Value", "execution_order", "value_made", "value_needed"]


class Value(NamedTuple):
    """What a stage hands to its neighbour: the output of its forward, or the gradient of its input."""

    stage: int  # the stage that makes it
    is_gradient: bool
    microbatch: int


def value_made(action: Action) -> Value | None:
    """The value that `action` makes; None for W."""
    if action.kind == ActionKind.W:
        return None
    return Value(action.stage, action.kind != ActionKind.F, action.microbatch)


def value_needed(action: Action, stages: int) -> Value | None:
    """The value that `action` receives from a neighbouring stage; None where it needs none."""
    if action.kind == ActionKind.W:
        return None
    if action.kind == ActionKind.F:
        return Value(action.stage - 1, False, action.microbatch) if action.stage else None
    return Value(action.stage + 1, True, action.microbatch) if action.stage + 1 < stages else None


def execution_order(plan: Plan) -> list[tuple[int, Action]]:
    """All (rank, action), each rank's in its own order, every action after the one whose value it receives.

    Takes a plan whose actions are complete (see `validate`). Raises PlanError, naming the actions that wait for each
    other, if there is no such order: ranks that run the plan with blocking receives would hang.
    """
    stages = plan.stages
    order: list[tuple[int, Action]] = []
    positions = [0] * len(plan.ranks)
    made: set[Value] = set()
    waiting: dict[Value, int] = {}  # at most one rank waits for a value: that of the neighbouring stage
    runnable = deque(range(len(plan.ranks)))
    while runnable:
        rank = runnable.popleft()
        row = plan.ranks[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            needed = value_needed(action, stages)
            if needed is not None and needed not in made:
                waiting[needed] = rank
                break
            order.append((rank, action))
            positions[rank] += 1
            value = value_made(action)
            if value is not None:
                made.add(value)
                if value in waiting:
                    runnable.append(waiting.pop(value))
    if waiting:
        raise PlanError(_describe_deadlock(plan, positions))
    return order


def _describe_deadlock(plan: Plan, positions: list[int]) -> str:
    """Every rank that is not done waits for an action of a rank that is not done: follow them until one comes twice."""
    stuck: dict[int, str] = {}
    rank = next(r for r, row in enumerate(plan.ranks) if positions[r] < len(row))
    while rank not in stuck:
        action = plan.ranks[rank][positions[rank]]
        needed = value_needed(action, plan.stages)
        assert needed is not None
        source = plan.rank_of_stage(needed.stage)
        maker = next(a for a in plan.ranks[source][positions[source] :] if value_made(a) == needed)
        where = "later on the same rank" if source == rank else f"on rank {source}"
        stuck[rank] = f"{action} on rank {rank} waits for {maker} {where}"
        rank = source
    cycle = list(stuck.values())[list(stuck).index(rank) :]
    return f"plan {plan.name!r} deadlocks: {'; '.join(cycle)}. Reorder one of these ranks."
