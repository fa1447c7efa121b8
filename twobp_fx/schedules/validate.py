"""Proof that a plan can run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Real

from ..errors import InputError, PlanError
from .actions import ActionKind
from .costs import Costs
from .memory import Memory
from .order import link, run_order
from .plan import Plan, rank_text

__all__ = ["check_complete", "validate"]

F, I, W, B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B
_ABSENT = -1

_TOLERANCE = 1e-9  # relative: sums of bytes and shares are not exact


def validate(plan: Plan, *, memory_cap: float | Sequence[float] | None = None, costs: Costs | None = None) -> None:
    """Return if every rank can run its row of `plan` to the end, and all work is then done; else raise PlanError.

    - Every rank has an action; the stages are 0 to n - 1, each on one rank.
    - Every stage has, for every micro-batch of the plan, one F, and either one B or one I and one W.
    - On its rank, F comes before I or B, and I before W.
    - No deadlock when every rank runs its row in order and blocks until a value that it needs has been received.
    - No rank ever holds more than `memory_cap`: a number for all ranks, or one a rank. In whole stages' micro-batches,
      or in bytes if `costs` has sizes (see `Costs.saved`). None: no cap.

    The message names the actions in conflict, and the rank with its line in the plan's CSV; positions in the line are
    counted from 0. Takes time in proportion to the number of actions. Raises InputError for a cap that is no cap.
    """
    check_complete(plan)
    run_order(plan, link(plan))
    if memory_cap is not None:
        _check_memory(plan, _caps(memory_cap, len(plan.ranks)), Memory.of(plan, costs or Costs()))


def check_complete(plan: Plan) -> None:
    """All that `validate` checks without following values from rank to rank."""
    _check_placement(plan)
    positions = _locate(plan)
    forward, backward_input, weight, backward = (positions[kind].get for kind in (F, I, W, B))
    key = 0
    for stage in range(plan.stages):
        for microbatch in range(plan.microbatches):
            at = (forward(key, _ABSENT), backward_input(key, _ABSENT), weight(key, _ABSENT), backward(key, _ABSENT))
            if not _is_complete(*at):
                raise PlanError(_fault(plan, stage, microbatch, dict(zip((F, I, W, B), at, strict=True))))
            key += 1


def _check_placement(plan: Plan) -> None:
    stages = set()
    for rank, row in enumerate(plan.ranks):
        if not row:
            raise PlanError(f"plan {plan.name!r}: {rank_text(rank)} has no action; use fewer ranks")
        for stage in {action.stage for action in row}:
            home = plan.rank_of_stage(stage)
            if home != rank:
                first, other = (next(a for a in plan.ranks[r] if a.stage == stage) for r in (home, rank))
                raise PlanError(
                    f"plan {plan.name!r}: stage {stage} is on two ranks: {first} is on {rank_text(home)}, {other} on "
                    f"{rank_text(rank)}; move all of a stage's actions to one rank"
                )
            stages.add(stage)
    if len(stages) != plan.stages:
        missing = next(stage for stage in range(plan.stages) if stage not in stages)
        raise PlanError(
            f"plan {plan.name!r}: there is a stage {plan.stages - 1} but no stage {missing}; number the stages from 0 without a gap"
        )


def _locate(plan: Plan) -> dict[ActionKind, dict[int, int]]:
    """By kind, then by stage * microbatches + microbatch: the action's position in the row of the stage's rank."""
    positions: dict[ActionKind, dict[int, int]] = {kind: {} for kind in ActionKind}
    microbatches = plan.microbatches
    for rank, row in enumerate(plan.ranks):
        for position, action in enumerate(row):
            of_kind = positions[action.kind]
            key = action.stage * microbatches + action.microbatch
            if key in of_kind:
                raise PlanError(
                    f"plan {plan.name!r}: {rank_text(rank)} runs {action} twice, at positions {of_kind[key]} and {position}; "
                    "remove one"
                )
            of_kind[key] = position
    return positions


def _is_complete(forward: int, backward_input: int, weight: int, backward: int) -> bool:
    """Whether one micro-batch at one stage has all its actions, and has them in order, from their positions."""
    if backward == _ABSENT:
        return 0 <= forward < backward_input < weight
    return 0 <= forward < backward and backward_input == weight == _ABSENT


def _fault(plan: Plan, stage: int, microbatch: int, at: dict[ActionKind, int]) -> str:
    kinds = {kind: position for kind, position in at.items() if position != _ABSENT}

    def text(kind: ActionKind) -> str:
        return f"{stage}{kind}{microbatch}"

    def problem() -> str:
        if F not in kinds:
            return f"{text(F)} is missing; every stage runs one F for each of {plan.microbatches} micro-batches"
        if B in kinds and (I in kinds or W in kinds):
            return f"{text(B)} and {text(I if I in kinds else W)} exclude each other; keep either B, or I and W"
        if not kinds.keys() - {F}:
            return f"{text(F)} has no backward; add {text(B)}, or {text(I)} and {text(W)}"
        if B not in kinds and I not in kinds:
            return f"{text(W)} has no {text(I)}; add it before {text(W)}"
        if B not in kinds and W not in kinds:
            return f"{text(I)} has no {text(W)}; add it after {text(I)}"
        chain = (F, B) if B in kinds else (F, I, W)
        earlier, later = next((a, b) for a, b in pairwise(chain) if kinds[a] > kinds[b])
        return (
            f"{text(later)} at position {kinds[later]} comes before {text(earlier)} at position {kinds[earlier]}, "
            "which it needs; swap them"
        )

    return f"plan {plan.name!r}, {rank_text(plan.rank_of_stage(stage))}: {problem()}"


def _caps(memory_cap: float | Sequence[float], ranks: int) -> tuple[float, ...]:
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * ranks
    if not all(_is_cap(cap) for cap in caps):
        raise InputError(f"memory_cap is {memory_cap!r}; it must be a number greater than 0, or one a rank")
    if len(caps) != ranks:
        raise InputError(f"memory_cap has {len(caps)} entries, but the plan has {ranks} ranks; give one number, or one a rank")
    return caps


def _check_memory(plan: Plan, caps: tuple[float, ...], memory: Memory) -> None:
    for rank, (row, cap, levels) in enumerate(zip(plan.ranks, caps, memory.levels(plan), strict=True)):
        if max(levels) <= cap * (1 + _TOLERANCE):
            continue
        over = next(position for position, level in enumerate(levels) if level > cap * (1 + _TOLERANCE))
        frees = next(position for position in range(over + 1, len(row)) if levels[position] < levels[position - 1])
        raise PlanError(
            f"plan {plan.name!r}, {rank_text(rank)}: with {row[over]} at position {over} it holds {levels[over]:g}, more than its "
            f"memory cap of {cap:g}; the next to free any is {row[frees]} at position {frees}: run that first, or raise the cap"
        )


def _is_cap(value: object) -> bool:
    return isinstance(value, Real) and float(value) > 0
