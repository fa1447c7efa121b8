"""The schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..errors import PlanError
from .dualpipe_v import dualpipe_v
from .gpipe import gpipe
from .interleaved import interleaved_1f1b
from .naive import naive
from .one_f_one_b import one_f_one_b
from .plan import MAX_ACTIONS, Plan
from .v_memory import v_half, v_min
from .zb_v import zb_v
from .zero_bubble import zb_h1, zb_h2

__all__ = ["SCHEDULES", "Schedule", "build"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a named schedule is made, and what it can take.

    generate: (ranks, micro-batches, chunks, split) -> the plan.
    microbatches: how many micro-batches, for so many ranks, if none are asked for; the only number if `fixed`.
    least: the smallest number of micro-batches, for so many ranks; `multiple`: only multiples of the number of ranks.
    chunks: stages a rank; `more_chunks`: or more.
    always_split: whether there is no form without the split.
    """

    generate: Callable[[int, int, int, bool], Plan]
    microbatches: Callable[[int], int]
    fixed: bool = False
    least: Callable[[int], int] = lambda ranks: 1
    multiple: bool = False
    chunks: int = 1
    more_chunks: bool = False
    always_split: bool = False


def _once(ranks: int) -> int:
    return ranks


def _twice(ranks: int) -> int:
    return 2 * ranks


def _one_chunk(generate: Callable[[int, int, bool], Plan]) -> Callable[[int, int, int, bool], Plan]:
    return lambda ranks, microbatches, chunks, split: generate(ranks, microbatches, split)


def _split(generate: Callable[[int, int], Plan], *, chunks: int, least: Callable[[int], int] = lambda ranks: 1) -> Schedule:
    return Schedule(
        lambda ranks, microbatches, chunks, split: generate(ranks, microbatches),
        _twice,
        least=least,
        chunks=chunks,
        always_split=True,
    )


def _automatic(ranks: int, microbatches: int, chunks: int, split: bool) -> Plan:
    """The best plan found at equal times, within 1F1B's memory. `find_plan` takes measured times."""
    from .automatic import find_plan  # here, because it compares with the catalog

    return find_plan(ranks=ranks, microbatches=microbatches, chunks=chunks, solver="greedy", time_limit=1).plan


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "naive": Schedule(_one_chunk(naive), lambda ranks: 1),
        "gpipe": Schedule(_one_chunk(gpipe), _once),
        "1f1b": Schedule(_one_chunk(one_f_one_b), _once),
        "1f1b-1": Schedule(_one_chunk(one_f_one_b), _once, fixed=True),
        "1f1b-2": Schedule(_one_chunk(one_f_one_b), _twice, fixed=True),
        "interleaved-1f1b": Schedule(interleaved_1f1b, _twice, multiple=True, chunks=2, more_chunks=True),
        "zb-h1": _split(zb_h1, chunks=1),
        "zb-h2": _split(zb_h2, chunks=1),
        "zb-v": _split(zb_v, chunks=2),
        "v-half": _split(v_half, chunks=2),
        "v-min": _split(v_min, chunks=2),
        "dualpipe-v": _split(dualpipe_v, chunks=2, least=_twice),
        "auto": Schedule(_automatic, _twice, more_chunks=True, always_split=True),
    }
)


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int | None = None,
    chunks: int | None = None,
    split_backward: bool = True,
) -> Plan:
    """The plan of the schedule called `name`.

    microbatches: by default 1 for naive, `ranks` for gpipe, 1f1b and 1f1b-1, and twice `ranks` for the others.
        interleaved-1f1b takes multiples of `ranks`, dualpipe-v at least twice `ranks`, 1f1b-1 and 1f1b-2 their own
        number only.
    chunks: stages a rank, by default as few as the schedule can have. interleaved-1f1b takes 2 or more, auto any number;
        zb-v, v-half, v-min and dualpipe-v place 2 in a V; the others hold one.
    split_backward: False runs B where the split plan runs I, and no W. The zero-bubble family (zb-h1, zb-h2, zb-v, v-half,
        v-min, dualpipe-v) and auto are always split.
    auto is the best plan that `find_plan` finds at equal times within 1F1B's memory.
    Raises PlanError for an unknown name and for numbers that the schedule cannot take.
    """
    schedule = SCHEDULES.get(name)
    if schedule is None:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"unknown schedule {name!r}{hint} The known schedules are {', '.join(SCHEDULES)}.")
    _check_positive("ranks", ranks)
    if microbatches is None:
        microbatches = schedule.microbatches(ranks)
    _check_positive("microbatches", microbatches)
    _check_microbatches(name, schedule, ranks, microbatches)
    if chunks is None:
        chunks = schedule.chunks
    _check_chunks(name, schedule, chunks)
    if schedule.always_split and not split_backward:
        raise PlanError(f"schedule {name!r} is always split; leave out split_backward=False, or use '1f1b'")
    if ranks * microbatches * chunks * (3 if split_backward else 2) > MAX_ACTIONS:
        raise PlanError(f"{ranks} ranks and {microbatches} micro-batches make a plan of more than {MAX_ACTIONS} actions; use fewer")
    return replace(schedule.generate(ranks, microbatches, chunks, split_backward), name=name)


def _check_positive(what: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{what} is {value!r}; it must be a whole number of at least 1")


def _check_microbatches(name: str, schedule: Schedule, ranks: int, microbatches: int) -> None:
    default, least = schedule.microbatches(ranks), schedule.least(ranks)
    if schedule.fixed and microbatches != default:
        raise PlanError(
            f"schedule {name!r} on {ranks} ranks runs {default} micro-batches, not {microbatches}; use '1f1b' for any number"
        )
    if microbatches < least:
        raise PlanError(
            f"schedule {name!r} on {ranks} ranks runs at least {least} micro-batches, not {microbatches}; use more, or 'zb-v'"
        )
    if schedule.multiple and microbatches % ranks:
        below, above = microbatches // ranks * ranks, (microbatches // ranks + 1) * ranks
        raise PlanError(
            f"schedule {name!r} on {ranks} ranks runs a multiple of {ranks} micro-batches, not {microbatches}; use "
            f"{f'{below} or ' if below else ''}{above}"
        )


def _check_chunks(name: str, schedule: Schedule, chunks: int) -> None:
    if chunks == schedule.chunks and not isinstance(chunks, bool):
        return
    if schedule.more_chunks:
        _check_positive("chunks", chunks)
        if chunks < schedule.chunks:
            raise PlanError(f"schedule {name!r} holds {schedule.chunks} or more stages a rank, not {chunks}; for one, use '1f1b'")
        return
    held = "one stage" if schedule.chunks == 1 else f"{schedule.chunks} stages"
    raise PlanError(f"schedule {name!r} holds {held} a rank, not {chunks}; leave out chunks")
