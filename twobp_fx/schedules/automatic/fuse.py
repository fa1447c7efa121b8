"""B in place of I and W that run back to back, where B costs less than the two.

    before   1F3 1I2 1W0 1F4 1I3 1W1       (W is the oldest pending one)
    after    1F3 1B2 1F4 1B3

Which W follows an I is a matter of names (micro-batches are alike), so that it can be the I's own. B keeps the gradient
of the input until it ends, which may cost others more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..actions import Action, ActionKind
from ..plan import Plan

__all__ = ["fuse"]

_LARGE = 20_000  # actions
_TOLERANCE = 1e-9


def fuse(plan: Plan, stages: Sequence[int], time: Callable[[Plan], float]) -> Plan:
    """`plan` with B at `stages`, on all ranks, or on those where it does not raise `time`: whichever takes less.

    Calls `time` once a rank and twice more; for large plans, which are fused as a whole or not at all, twice.
    """
    fused = [_fuse_row(row, stages) for row in plan.ranks]
    best = time(plan)
    everywhere = Plan(plan.name, tuple(fused))
    least = time(everywhere)
    if sum(map(len, plan.ranks)) <= _LARGE:
        for rank, row in enumerate(fused):
            changed = Plan(plan.name, (*plan.ranks[:rank], row, *plan.ranks[rank + 1 :]))
            changed_time = time(changed)
            if changed_time <= best * (1 + _TOLERANCE):
                plan, best = changed, changed_time
    return everywhere if least <= best * (1 + _TOLERANCE) else plan


def _fuse_row(row: Sequence[Action], stages: Sequence[int]) -> tuple[Action, ...]:
    fused: list[Action] = []
    pending: dict[int, list[int]] = {}  # for each stage, the micro-batches whose W is to come
    for action in row:
        waiting = pending.setdefault(action.stage, [])
        if action.kind != ActionKind.W:
            fused.append(action)
            if action.kind == ActionKind.I:
                waiting.append(action.microbatch)
        elif action.stage in stages and fused[-1].kind == ActionKind.I and fused[-1].stage == action.stage:
            fused[-1] = Action(action.stage, ActionKind.B, waiting.pop())
        else:
            fused.append(Action(action.stage, ActionKind.W, waiting.pop(0)))
    return tuple(fused)
