"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473), and its zero-bubble form (arXiv 2401.10241)."""

from __future__ import annotations

from .actions import Action, ActionKind
from .placement import looped
from .plan import Plan

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int, split: bool) -> Plan:
    """`chunks` stages a rank, looped; `microbatches` is a multiple of `ranks`.

    Forwards go in groups of as many micro-batches as ranks: one group through the rank's first stage, then through its
    next one, and after the last stage the next group. Backwards do the same from the last stage to the first. Rank r
    of p warms up with (v - 1) p + 2 (p - 1 - r) forwards, then runs one forward and one backward in turn, then the
    backwards that are left.

    Split, the backward is I, a rank warms up with one forward less for each rank behind it, because I comes back in half
    the time, and W number k follows I number k + r, so that W fills the gaps of the cooldown. This is the order of
    torch's ScheduleInterleavedZeroBubble. Rank 1 of 2, two stages a rank, two micro-batches:

        split    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
        unsplit  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    placement = looped(ranks, chunks)
    rows = []
    for rank in range(ranks):
        stages = placement.stages_of_rank(rank)
        forwards = _grouped(stages, ActionKind.F, ranks, microbatches)
        backwards = _grouped(stages[::-1], ActionKind.I if split else ActionKind.B, ranks, microbatches)
        behind = ranks - 1 - rank
        warmup = (chunks - 1) * ranks + (behind if split else 2 * behind)
        rows.append(_row(forwards, backwards, warmup, rank if split else None))
    return Plan("interleaved-1f1b", tuple(rows))


def _grouped(stages: tuple[int, ...], kind: ActionKind, group: int, microbatches: int) -> list[Action]:
    """`kind` for every micro-batch at every stage: group after group, each of them through all the stages."""
    starts = range(0, microbatches, group)
    return [Action(stage, kind, start + k) for start in starts for stage in stages for k in range(group)]


def _row(forwards: list[Action], backwards: list[Action], warmup: int, delay: int | None) -> tuple[Action, ...]:
    """`delay`: by how many backwards W waits; None for no W."""
    row = forwards[:warmup]
    for number, backward in enumerate(backwards):
        row += forwards[warmup + number : warmup + number + 1]
        row.append(backward)
        if delay is not None and number >= delay:
            row.append(_weight(backwards[number - delay]))
    if delay:
        row += map(_weight, backwards[-delay:])
    return tuple(row)


def _weight(backward: Action) -> Action:
    return Action(backward.stage, ActionKind.W, backward.microbatch)
