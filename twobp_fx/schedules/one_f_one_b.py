"""1F1B (PipeDream-Flush, arXiv 2006.09503), and its 2BP form (arXiv 2405.18047)."""

from __future__ import annotations

from .actions import Action, ActionKind
from .plan import Plan

__all__ = ["one_f_one_b"]


def one_f_one_b(ranks: int, microbatches: int, split: bool) -> Plan:
    """One stage a rank, any number of micro-batches.

    Rank r of N runs N - r warm-up forwards (as many as there are), then one backward and one forward in turn until the
    forwards run out, then the backwards that are left. Split, the backward of that order is I. No W runs while forwards
    are left. Then one W, of the oldest micro-batch, follows each I: it fills the gap in which the rank would wait for
    the next gradient. The W that remain run at the end. Rank 1 of 3, four micro-batches:

        split    1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3
        unsplit  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3

    Holding W back keeps micro-batches alive: `microbatches - (N - r)` W are pending when the cooldown begins, so that
    the peak grows with the number of micro-batches, not of ranks.
    """
    return Plan("1f1b", tuple(_row(rank, ranks - rank, microbatches, split) for rank in range(ranks)))


def _row(stage: int, warmup: int, microbatches: int, split: bool) -> tuple[Action, ...]:
    warmup = min(warmup, microbatches)
    steady = microbatches - warmup
    backward = ActionKind.I if split else ActionKind.B

    row = [Action(stage, ActionKind.F, k) for k in range(warmup)]
    for k in range(steady):
        row += [Action(stage, backward, k), Action(stage, ActionKind.F, warmup + k)]
    for k in range(steady, microbatches):
        row.append(Action(stage, backward, k))
        if split:
            row.append(Action(stage, ActionKind.W, k - steady))
    if split:
        row += [Action(stage, ActionKind.W, k) for k in range(warmup, microbatches)]
    return tuple(row)
