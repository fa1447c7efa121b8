"""GPipe (arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from .actions import Action, ActionKind
from .plan import Plan

__all__ = ["gpipe"]


def gpipe(ranks: int, microbatches: int, split: bool) -> Plan:
    """One stage a rank; split, every W waits for the end, after the rank's last I (arXiv 2405.18047).

    Rank 1, two micro-batches:

        split    1F0 1F1 1I0 1I1 1W0 1W1
        unsplit  1F0 1F1 1B0 1B1
    """
    phases = (ActionKind.F, ActionKind.I, ActionKind.W) if split else (ActionKind.F, ActionKind.B)
    rows = (tuple(Action(stage, kind, k) for kind in phases for k in range(microbatches)) for stage in range(ranks))
    return Plan("gpipe", tuple(rows))
