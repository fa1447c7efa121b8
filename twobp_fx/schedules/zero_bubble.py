"""ZB-H1 and ZB-H2, the hand-made schedules of "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 2).

B of that paper is our I. M_B is what a micro-batch holds before I, M_W what it holds between I and W; p is the number of
ranks, and rank i is counted from 1.
"""

from __future__ import annotations

from .actions import Action, ActionKind
from .greedy import greedy
from .placement import one_chunk
from .plan import Plan

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> Plan:
    """1F1B's memory, a third of its bubble: bubble (p - 1) (T_F + T_I - T_W), peak (p - i + 1) M_B + (i - 1) M_W.

    1F1B with I in place of its backward; W number k follows I number k + i - 1, so that later ranks, which hold fewer
    micro-batches before I, hold more before W, and every rank has W left for the gaps of the cooldown.
    Rank 2 of 3 (stage 1), four micro-batches:

        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    """
    return Plan("zb-h1", tuple(_h1_row(rank, ranks - 1 - rank, microbatches) for rank in range(ranks)))


def _h1_row(stage: int, behind: int, microbatches: int) -> tuple[Action, ...]:
    row = [Action(stage, ActionKind.F, k) for k in range(min(behind, microbatches))]
    for k in range(microbatches):
        if k + behind < microbatches:
            row.append(Action(stage, ActionKind.F, k + behind))
        row.append(Action(stage, ActionKind.I, k))
        if k >= stage:
            row.append(Action(stage, ActionKind.W, k - stage))
    row += [Action(stage, ActionKind.W, k) for k in range(max(0, microbatches - stage), microbatches)]
    return tuple(row)


def zb_h2(ranks: int, microbatches: int) -> Plan:
    """No bubble at equal times, for twice the memory: bubble (p - 1) (T_F + T_I - 2 T_W), peak (2p - 2i + 1) M_B + (2i - 2) M_W.

    More forwards before the first I fill the gap of the warm-up, and W's order that of the cooldown, so that a rank's
    work is a parallelogram: rank i begins and ends i - 1 units late. The bubble is so of each rank by itself; the step
    of all ranks together, with a barrier at its end, takes as long as ZB-H1's.
    """
    plan, _ = greedy(
        "zb-h2",
        one_chunk(ranks),
        microbatches,
        in_flight=[2 * (ranks - rank) - 1 for rank in range(ranks)],
        held=2 * ranks - 1,
        order=[(ActionKind.I, 0), (ActionKind.F, 0)],
    )
    return plan
