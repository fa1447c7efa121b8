"""V-Half and V-Min: a half and a third of 1F1B's memory ("Pipeline Parallelism with Controllable Memory", arXiv 2405.15362).

A building block is the schedule of one micro-batch: when each of a rank's two stages, placed in a V, runs F and I.
Repeated every 6 units (F, I and W of two stages), it is the schedule of all micro-batches, and a stage holds as many of
them as its F and I are units apart, over 6. The block so decides the memory. W goes where the rank is free, and the
result is squeezed: everything starts as early as its inputs and the memory allow.

The block's offsets, from one rank to the next: V-Min goes down and up one unit a rank, both ways, the least there is.
V-Half goes down at two units and up at one.
"""

from __future__ import annotations

from .actions import ActionKind
from .greedy import greedy
from .placement import v_shape
from .plan import Plan

__all__ = ["v_half", "v_min"]

F, I = ActionKind.F, ActionKind.I

_INTERVAL = 6

_ORDERS = (
    ((F, 1), (F, 0), (I, 1), (I, 0)),
    ((I, 0), (F, 1), (I, 1), (F, 0)),
)
"""What runs first where several actions could: which is better depends on the number of ranks, so both are tried."""


def v_half(ranks: int, microbatches: int) -> Plan:
    """Peak p // 2 + 1 of 1F1B's p; about half of 1F1B's bubble."""
    p = ranks
    shift = 3 if p % 2 == 0 else 0  # keeps F and I of different micro-batches off each other's units
    first = [(6 * p + shift - r - 2) - 2 * r for r in range(p)]
    second = [(3 * p + shift + 2 * r - 1) - (3 * p - r - 2) for r in range(p)]
    return _squeeze("v-half", ranks, microbatches, first, second, held=2 * (p // 2 + 1))


def v_min(ranks: int, microbatches: int) -> Plan:
    """Peak (p + 4) // 3 of 1F1B's p; about two thirds of 1F1B's bubble, and O(m) more where F, I and W differ."""
    p = ranks
    shift = 2 if p % 3 == 0 else 0
    first = [(4 * p + shift - r - 1) - r for r in range(p)]
    second = [(2 * p + shift + r) - (2 * p - r - 1) for r in range(p)]
    return _squeeze("v-min", ranks, microbatches, first, second, held=2 * ((p + 4) // 3))


def _squeeze(name: str, ranks: int, microbatches: int, first: list[int], second: list[int], held: int) -> Plan:
    """`first` and `second`: the units from the start of F to the start of I, of each rank's first and second stage."""
    spans = [*first, *reversed(second)]  # in the order of the stages
    in_flight = [-(-(span + 1) // _INTERVAL) for span in spans]
    plans = (greedy(name, v_shape(ranks), microbatches, in_flight=in_flight, held=held, order=order) for order in _ORDERS)
    return min(plans, key=lambda made: made[1])[0]
