"""`find_plan`: the steps of the search, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from operator import sub
from typing import Literal

from ...errors import InputError, PlanError
from ..catalog import SCHEDULES, build
from ..costs import Costs
from ..memory import Memory
from ..placement import Placement, looped, v_shape
from ..plan import MAX_ACTIONS, Plan
from ..simulate import Simulation, simulate
from .bounds import lower_bound
from .exact import have_solver, solve_exactly
from .fuse import fuse
from .policies import search_policies
from .problem import I, Problem, W, in_order, plan_of_steps

__all__ = ["Found", "find_plan"]

_ACTIONS_PER_SECOND = 200_000
"""How many actions list scheduling places in a second of `time_limit`, on a slow machine."""

_EXACT_ACTIONS = 800
"""Above this many actions CP-SAT seldom improves on the policies within seconds (tried with up to 1152)."""

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan that `find_plan` found. Times are in the unit of the costs."""

    plan: Plan
    longest_stage: float
    """The largest of: a rank's last end minus its own first start."""
    makespan: float
    """From the first start to the last end, over all ranks."""
    bubble_ratio: float
    """1 - work / (ranks * time), where time is the one that was minimised: `longest_stage`, or with a barrier `makespan`."""
    peak_memory: tuple[float, ...]
    """For each rank, the most that it holds at once, in the unit of the memory cap."""
    lower_bound: float
    """Proven: no plan, its micro-batches in order at every stage, that keeps the caps takes less of the minimised time."""
    gap: float
    """time / lower_bound - 1. At 0 the plan is optimal."""
    method: str
    """Which step found the plan: "list scheduling", "CP-SAT", or the name of a published schedule."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    time: float
    plan: Plan
    method: str


def find_plan(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    chunks: int = 1,
    placement: Literal["looped", "v"] | None = None,
    barrier: bool = False,
    solver: Literal["auto", "greedy", "exact"] = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
) -> Found:
    """The plan of the least longest stage, or with `barrier` of the least makespan, that a search can find.

    `costs` holds times for `ranks * chunks` stages, and defaults to 1 for F, I and W. The longest stage is what a step
    takes when ranks need not wait for each other between steps, and the makespan what it takes when they must.

    `memory_cap`, one number or one a rank, is what `validate` takes: in whole stages' micro-batches, or in bytes if `costs`
    has sizes. None stands for `ranks` micro-batches on every rank, 1F1B's largest. The cap must have room for what one
    micro-batch holds at all of a rank's stages, before or after I.

    `placement` says where stages live if `chunks` is 2 or more: "looped" is stage s on rank s mod `ranks`, "v" (2 chunks)
    goes down the ranks and back up. None tries both where there are both.

    The plan is never worse than any published schedule of the catalog that has as many stages in the same places and keeps
    the caps. "greedy" searches by list scheduling alone and always finds a plan. "exact" then solves a constraint program
    with OR-Tools (`pip install twobp-fx[solver]`). "auto" does so where it pays: OR-Tools is there, the plan is not
    proven optimal yet, and has at most 800 actions.

    `time_limit` is about seconds of search. Work is counted instead of time, so that a call finds the same plan each time
    and everywhere; checking published schedules comes on top. Raises InputError for arguments that are out of range, and
    for "exact" without OR-Tools.
    """
    costs = costs or Costs()
    _check(ranks, microbatches, chunks, placement, solver, time_limit)
    if solver == "exact" and not have_solver():
        raise InputError("solver='exact' needs OR-Tools: pip install 'twobp-fx[solver]', or use solver='greedy'")

    problems = [_problem(place, microbatches, costs, memory_cap, barrier) for place in _placements(ranks, chunks, placement)]
    best, bound = _solve(problems[0], costs, solver, time_limit / len(problems), seed)
    for problem in problems[1:]:
        if _meets(best.time, lower_bound(problem)):  # no search can do better there
            bound = min(bound, lower_bound(problem))
            continue
        candidate, its_bound = _solve(problem, costs, solver, time_limit / len(problems), seed)
        best, bound = min(best, candidate, key=lambda found: found.time), min(bound, its_bound)

    simulation = simulate(best.plan, costs)
    work = math.fsum(end - start for row in simulation.timeline for _, start, end in row)
    gap = best.time / bound - 1 if bound else 0.0
    return Found(
        plan=replace(best.plan, name="auto"),
        longest_stage=simulation.longest_stage,
        makespan=simulation.makespan,
        bubble_ratio=1 - work / (ranks * best.time) if best.time else 0.0,
        peak_memory=simulation.peak_memory,
        lower_bound=bound,
        gap=gap if gap > _TOLERANCE else 0.0,
        method=best.method,
    )


def _solve(problem: Problem, costs: Costs, solver: str, time_limit: float, seed: int) -> tuple[_Candidate, float]:
    """The best plan found for one placement, and a lower bound of its time."""
    bound = lower_bound(problem)
    best = _best_published(problem, costs, bound)
    exact = solver == "exact" or (solver == "auto" and have_solver() and problem.actions <= _EXACT_ACTIONS)
    cheaper = tuple(s for s in range(problem.stages) if problem.fused[s] < problem.times[I][s] + problem.times[W][s])

    def consider(plan: Plan, method: str) -> None:
        nonlocal best
        if cheaper:
            plan = fuse(plan, cheaper, lambda changed: _time(simulate(changed, costs), problem))
        simulation = simulate(plan, costs)
        time = _time(simulation, problem)
        if _keeps_caps(simulation, problem) and (best is None or time < best.time * (1 - _TOLERANCE)):
            best = _Candidate(time, plan, method)

    if best is None or not _meets(best.time, bound):
        budget = int(time_limit * _ACTIONS_PER_SECOND / (2 if exact else 1))
        time, rows = search_policies(problem, target=bound, budget=budget, seed=seed)
        scheduled = plan_of_steps(rows)
        consider(scheduled, "list scheduling")
        assert best is not None  # list scheduling keeps the caps
        if exact and not _meets(best.time, bound):
            known = in_order(best.plan) if best.time < time else None
            solved, solver_bound = solve_exactly(problem, known or scheduled, bound=bound, limit=time_limit / 2, seed=seed)
            if solved is not None:
                consider(solved, "CP-SAT")
            if not cheaper and _is_split_best(problem):
                bound = max(bound, solver_bound)
    return best, bound


def _is_split_best(problem: Problem) -> bool:
    """Whether what the solver does not know, batches of W and the memory that B saves, can be of no use."""
    no_batches = all(len(adds) == 1 for adds in problem.weight_batches)
    return no_batches and all(held <= saved for saved, held in zip(problem.saved, problem.held, strict=True))


def _best_published(problem: Problem, costs: Costs, bound: float) -> _Candidate | None:
    """The best of the catalog's schedules on the same stages and ranks that keep the caps; the first to meet the bound."""
    best = None
    for name, schedule in SCHEDULES.items():
        for split_backward in (True, False):
            if name == "auto" or (schedule.always_split and not split_backward):
                continue
            try:
                plan = build(
                    name,
                    ranks=problem.ranks,
                    microbatches=problem.microbatches,
                    chunks=problem.chunks,
                    split_backward=split_backward,
                )
            except PlanError:
                continue  # not for these numbers
            if tuple(map(plan.rank_of_stage, range(plan.stages))) != problem.placement.rank_of_stage:
                continue
            if not _fits(max(Memory.of(plan, costs).peaks(plan)), max(problem.memory_cap)):
                continue  # to simulate would be in vain
            simulation = simulate(plan, costs)
            time = _time(simulation, problem)
            if _keeps_caps(simulation, problem) and (best is None or time < best.time):
                best = _Candidate(time, plan, name)
                if _meets(time, bound):
                    return best
    return best


def _time(simulation: Simulation, problem: Problem) -> float:
    return simulation.makespan if problem.barrier else simulation.longest_stage


def _meets(time: float, bound: float) -> bool:
    return time <= bound * (1 + _TOLERANCE)


def _keeps_caps(simulation: Simulation, problem: Problem) -> bool:
    return all(map(_fits, simulation.peak_memory, problem.memory_cap))


def _fits(peak: float, cap: float) -> bool:
    return peak <= cap * (1 + _TOLERANCE)


def _placements(ranks: int, chunks: int, placement: str | None) -> list[Placement]:
    """Every placement that is asked for, the one that is mostly better first."""
    places = []
    if chunks == 2 and placement != "looped":
        places.append(v_shape(ranks))
    if placement != "v":
        places.append(looped(ranks, chunks))
    return places


def _problem(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    memory_cap: float | Sequence[float] | None,
    barrier: bool,
) -> Problem:
    stages, ranks, homes = placement.stages, placement.ranks, placement.rank_of_stage
    forward, inputs, fused, saved, held = (
        costs.per_stage(name, stages) for name in ("forward", "backward_input", "backward", "saved", "held_for_weight")
    )
    if costs.saved is None:
        saved = held = (ranks / stages,) * stages
    batches = costs.batches(stages)
    outputs, gradients = costs.comm_times(stages)
    needed = [math.fsum(max(saved[stage], held[stage]) for stage in placement.stages_of_rank(rank)) for rank in range(ranks)]
    return Problem(
        placement=placement,
        microbatches=microbatches,
        times=(forward, inputs, tuple(batch[0] for batch in batches)),
        weight_batches=tuple(tuple(map(sub, batch, (0.0, *batch))) for batch in batches),
        fused=fused,
        delays=(
            tuple(outputs[s] if s + 1 < stages and homes[s] != homes[s + 1] else 0.0 for s in range(stages)),
            tuple(gradients[s] if s and homes[s] != homes[s - 1] else 0.0 for s in range(stages)),
        ),
        saved=saved,
        held=held,
        memory_cap=_caps(memory_cap, needed),
        barrier=barrier,
    )


def _caps(memory_cap: float | Sequence[float] | None, needed: Sequence[float]) -> tuple[float, ...]:
    """`needed`: for each rank, what one micro-batch holds."""
    ranks = len(needed)
    if memory_cap is None:
        return tuple(ranks * one for one in needed)
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * ranks
    if len(caps) != ranks:
        raise InputError(f"memory_cap has {len(caps)} entries, but there are {ranks} ranks; give one a rank, or one number")
    for rank, (cap, one) in enumerate(zip(caps, needed, strict=True)):
        if not _is_number(cap) or not _fits(one, cap):
            raise InputError(
                f"memory_cap of rank {rank} is {cap!r}; it must be a finite number of at least {one:g}, what one micro-batch holds"
            )
    return tuple(map(float, caps))


def _check(
    ranks: int,
    microbatches: int,
    chunks: int,
    placement: str | None,
    solver: str,
    time_limit: float,
) -> None:
    for name, count in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(f"{name} is {count!r}; it must be a whole number of at least 1")
    if 3 * ranks * chunks * microbatches > MAX_ACTIONS:
        raise InputError(
            f"{ranks} ranks, {chunks} chunks and {microbatches} micro-batches make a plan of more than {MAX_ACTIONS} "
            "actions; use fewer"
        )
    if placement not in (None, "looped", "v"):
        raise InputError(f"placement is {placement!r}; use 'looped', 'v' or None")
    if placement == "v" and chunks != 2:
        raise InputError(f"placement 'v' puts two stages on each rank, not {chunks}; use chunks=2, or 'looped'")
    if solver not in ("auto", "greedy", "exact"):
        raise InputError(f"solver is {solver!r}; use 'auto', 'greedy' or 'exact'")
    if not _is_number(time_limit) or time_limit <= 0:
        raise InputError(f"time_limit is {time_limit!r}; it must be a positive number of seconds")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
