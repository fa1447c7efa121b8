"""The naive schedule: one micro-batch at a time goes all the way through the pipeline and back."""

from __future__ import annotations

from .actions import Action, ActionKind
from .plan import Plan

__all__ = ["naive"]


def naive(ranks: int, microbatches: int, split: bool) -> Plan:
    """One stage a rank; split, every W waits for the end, after the rank's last I (arXiv 2405.18047).

    Rank 1, two micro-batches:

        split    1F0 1I0 1F1 1I1 1W0 1W1
        unsplit  1F0 1B0 1F1 1B1
    """
    backward = ActionKind.I if split else ActionKind.B
    rows = []
    for stage in range(ranks):
        row = [Action(stage, kind, k) for k in range(microbatches) for kind in (ActionKind.F, backward)]
        if split:
            row += [Action(stage, ActionKind.W, k) for k in range(microbatches)]
        rows.append(tuple(row))
    return Plan("naive", tuple(rows))
