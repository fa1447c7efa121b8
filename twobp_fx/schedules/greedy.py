"""Plans by list scheduling at equal times: the zero-bubble papers give rules and limits, and this follows them.

All ranks advance together, an action a tick. At each tick a rank runs, of what can start, what `order` puts first; W,
which nobody waits for, only where nothing else can. Two limits keep its memory:

- `in_flight[stage]` bounds how many micro-batches a stage holds between its F and its I;
- `held` bounds how many micro-batches, over all of its stages, a rank holds between F and W. When it is reached, no F
  starts, so that W gets its turn.

Nothing can deadlock while, on every rank, `held` exceeds the sum of `in_flight` over all of its stages but the last:
pending W can always run, so that the last stage of a rank always finds room, and the last stage of all frees the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .actions import Action, ActionKind
from .placement import Placement
from .plan import Plan

__all__ = ["greedy"]


def greedy(
    name: str,
    placement: Placement,
    microbatches: int,
    *,
    in_flight: Sequence[int],
    held: int,
    order: Sequence[tuple[ActionKind, int]],
) -> tuple[Plan, int]:
    """The plan, and the most ticks that any rank takes from its first action to its last.

    `order` lists (F or I, chunk), what runs first coming first; chunk 0 is the first of a rank's stages. Micro-batches
    stay in order at every stage, and W runs in the order of I.
    """
    stages = placement.stages
    turns = []  # for each rank, (is it I, stage) in the order to try
    for rank in range(placement.ranks):
        own = placement.stages_of_rank(rank)
        turns.append([(kind == ActionKind.I, own[chunk]) for kind, chunk in order])

    forwards = [0] * stages  # how many have run, and below: how many a neighbour has made available
    inputs = [0] * stages
    arrived = [microbatches, *[0] * (stages - 1)]
    gradients = [0] * stages
    pending: list[deque[Action]] = [deque() for _ in turns]
    holding = [0] * len(turns)
    rows: list[list[Action]] = [[] for _ in turns]
    first = [0] * len(turns)
    last = [0] * len(turns)

    tick = 0
    remaining = 3 * stages * microbatches
    while remaining:
        ran: list[tuple[bool, int]] = []
        for rank, candidates in enumerate(turns):
            for is_input, stage in candidates:
                if is_input:
                    if inputs[stage] == gradients[stage]:
                        continue
                    action = Action(stage, ActionKind.I, inputs[stage])
                    inputs[stage] += 1
                    pending[rank].append(Action(stage, ActionKind.W, action.microbatch))
                else:
                    k = forwards[stage]
                    if k == arrived[stage] or holding[rank] == held or k - inputs[stage] >= in_flight[stage]:
                        continue
                    action = Action(stage, ActionKind.F, k)
                    forwards[stage] += 1
                    holding[rank] += 1
                ran.append((is_input, stage))
                break
            else:
                if not pending[rank]:
                    continue
                action = pending[rank].popleft()
                holding[rank] -= 1
            if not rows[rank]:
                first[rank] = tick
            last[rank] = tick
            rows[rank].append(action)
            remaining -= 1
        for is_input, stage in ran:  # what ends with this tick can be used in the next
            if is_input and stage:
                gradients[stage - 1] += 1
            elif not is_input:
                (arrived if stage + 1 < stages else gradients)[min(stage + 1, stages - 1)] += 1
        tick += 1
    longest = max(end - start + 1 for start, end in zip(first, last, strict=True))
    return Plan(name, tuple(map(tuple, rows))), longest
