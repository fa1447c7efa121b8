"""The dependencies between actions, and an order of all ranks' actions that respects them.

With each rank's order fixed, and F before I or B before W on every rank, one kind of dependency is left: the value that
a stage receives from its neighbour. F of stage s takes the output of F of stage s - 1; I and B of stage s take the
gradient that I or B of stage s + 1 makes.

Values are numbered, so that plans of many thousands of actions take seconds: see `Links`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..errors import PlanError
from .actions import Action, ActionKind
from .plan import Plan, rank_text

__all__ = ["NONE", "Links", "execution_order", "link", "run_order"]

NONE = -1
"""The number that stands for no value."""


@dataclass(frozen=True, slots=True)
class Links:
    """What every action receives and makes, by rank and position.

    The output of stage s for micro-batch k is value 2 (s m + k), where m is the number of micro-batches, and the gradient
    of its input is the number after that.
    """

    needs: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]


def link(plan: Plan) -> Links:
    """The values that the actions of `plan` hand to each other."""
    last = plan.stages - 1
    microbatches = plan.microbatches
    step = 2 * microbatches
    all_needs, all_makes = [], []
    for row in plan.ranks:
        needs, makes = [], []
        for action in row:
            if action.kind is ActionKind.W:
                needs.append(NONE)
                makes.append(NONE)
            elif action.kind is ActionKind.F:
                output = 2 * (action.stage * microbatches + action.microbatch)
                needs.append(output - step if action.stage else NONE)
                makes.append(output)
            else:
                gradient = 2 * (action.stage * microbatches + action.microbatch) + 1
                needs.append(gradient + step if action.stage != last else NONE)
                makes.append(gradient)
        all_needs.append(tuple(needs))
        all_makes.append(tuple(makes))
    return Links(tuple(all_needs), tuple(all_makes))


def execution_order(plan: Plan) -> list[tuple[int, Action]]:
    """All (rank, action), each rank's in its own order, every action after the one whose value it receives.

    Takes a plan whose actions are complete (see `validate`). Raises PlanError, naming the actions that wait for each
    other, if there is no such order: ranks that run the plan with blocking receives would hang.
    """
    return [(rank, plan.ranks[rank][position]) for rank, position in run_order(plan, link(plan))]


def run_order(plan: Plan, links: Links) -> list[tuple[int, int]]:
    """`execution_order`, as (rank, position in the rank's row)."""
    order: list[tuple[int, int]] = []
    positions = [0] * len(plan.ranks)
    made = {NONE}
    waiting: dict[int, int] = {}  # at most one rank waits for a value: that of the neighbouring stage
    runnable = deque(range(len(plan.ranks)))
    while runnable:
        rank = runnable.popleft()
        needs, makes = links.needs[rank], links.makes[rank]
        position = positions[rank]
        while position < len(needs):
            needed = needs[position]
            if needed not in made:
                waiting[needed] = rank
                break
            order.append((rank, position))
            value = makes[position]
            made.add(value)
            position += 1
            if value in waiting:
                runnable.append(waiting.pop(value))
        positions[rank] = position
    if waiting:
        raise PlanError(_describe_deadlock(plan, links, positions))
    return order


def _describe_deadlock(plan: Plan, links: Links, positions: list[int]) -> str:
    """Every rank that is not done waits for an action of a rank that is not done: follow them until one comes twice."""
    stuck: dict[int, str] = {}
    rank = next(r for r, row in enumerate(plan.ranks) if positions[r] < len(row))
    while rank not in stuck:
        position = positions[rank]
        needed = links.needs[rank][position]
        source = plan.rank_of_stage(needed // 2 // plan.microbatches)
        maker = plan.ranks[source][links.makes[source].index(needed, positions[source])]
        where = "later on the same rank" if source == rank else f"on {rank_text(source)}"
        stuck[rank] = f"{plan.ranks[rank][position]} on {rank_text(rank)} waits for {maker} {where}"
        rank = source
    cycle = list(stuck.values())[list(stuck).index(rank) :]
    return f"plan {plan.name!r} deadlocks: {'; '.join(cycle)}. Reorder one of these ranks."
