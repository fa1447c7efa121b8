"""ZB-V: no bubble at equal times in 1F1B's memory (arXiv 2401.10241, section 6)."""

from __future__ import annotations

from .actions import Action, ActionKind
from .placement import v_shape
from .plan import Plan

__all__ = ["zb_v"]

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W


def zb_v(ranks: int, microbatches: int) -> Plan:
    """Two stages a rank, placed in a V, so that the backward of a micro-batch starts on the rank where its forward ends.

    Peak p whole stages' micro-batches on every rank. Upper case is the rank's first stage, lower case its second; rank r
    of p, micro-batches in order:

        warm-up   2 (p - r) - 1 times F, then r times (f F), then p - r times (f i w)
        steady    (F I W f i w) until the forwards run out
        cooldown  r times (I i), then p - r times (I W), then w, then W, until all have run

    The paper fills the pipeline with 2p - 1 micro-batches; with fewer, the actions of those that are not there fall out.
    """
    placement = v_shape(ranks)
    return Plan("zb-v", tuple(_row(placement.stages_of_rank(rank), rank, ranks, microbatches) for rank in range(ranks)))


def _row(stages: tuple[int, ...], rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    full = max(microbatches, 2 * ranks - 1)
    done = {(chunk, kind): 0 for chunk in (0, 1) for kind in (F, I, W)}
    row: list[Action] = []

    def run(text: str) -> None:
        for letter in text:
            key = (int(letter.islower()), ActionKind(letter.upper()))
            if done[key] < microbatches:
                row.append(Action(stages[key[0]], key[1], done[key]))
            done[key] += 1

    run("F" * (2 * (ranks - rank) - 1) + "fF" * rank + "fiw" * (ranks - rank))
    while done[1, F] < full:
        run("FIWfiw" if done[0, F] < full else "IWfiw")
    run("Ii" * rank + "IW" * (ranks - rank))
    run("w" * (full - done[1, W]) + "W" * (full - done[0, W]))
    return tuple(row)
