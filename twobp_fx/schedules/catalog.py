"""The schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..errors import PlanError
from .gpipe import gpipe
from .naive import naive
from .one_f_one_b import one_f_one_b
from .plan import MAX_ACTIONS, Plan

__all__ = ["SCHEDULES", "Schedule", "build"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a named schedule is made.

    `generate(ranks, microbatches, split)` makes the plan; `microbatches(ranks)` is the default number of micro-batches,
    and the only one if `fixed`.
    """

    generate: Callable[[int, int, bool], Plan]
    microbatches: Callable[[int], int]
    fixed: bool = False


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "naive": Schedule(naive, lambda ranks: 1),
        "gpipe": Schedule(gpipe, lambda ranks: ranks),
        "1f1b": Schedule(one_f_one_b, lambda ranks: ranks),
        "1f1b-1": Schedule(one_f_one_b, lambda ranks: ranks, fixed=True),
        "1f1b-2": Schedule(one_f_one_b, lambda ranks: 2 * ranks, fixed=True),
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
    """The plan of the schedule called `name`, one stage a rank.

    `microbatches` defaults to 1 for naive, to twice `ranks` for 1f1b-2, and to `ranks` for the others. `chunks` is the
    number of stages a rank holds: these schedules hold one. `split_backward=False` runs B where the split plan runs I,
    and no W. Raises PlanError for an unknown name and for numbers that the schedule cannot take.
    """
    schedule = SCHEDULES.get(name)
    if schedule is None:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"unknown schedule {name!r}{hint} The known schedules are {', '.join(SCHEDULES)}.")
    _check_positive("ranks", ranks)
    default = schedule.microbatches(ranks)
    if microbatches is None:
        microbatches = default
    _check_positive("microbatches", microbatches)
    if schedule.fixed and microbatches != default:
        raise PlanError(
            f"schedule {name!r} on {ranks} ranks runs {default} micro-batches, not {microbatches}; use '1f1b' for any number"
        )
    if chunks not in (None, 1):
        raise PlanError(f"schedule {name!r} holds one stage a rank, not {chunks}; leave out chunks")
    if ranks * microbatches * (3 if split_backward else 2) > MAX_ACTIONS:
        raise PlanError(f"{ranks} ranks and {microbatches} micro-batches make a plan of more than {MAX_ACTIONS} actions; use fewer")
    return replace(schedule.generate(ranks, microbatches, split_backward), name=name)


def _check_positive(what: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{what} is {value!r}; it must be a whole number of at least 1")
