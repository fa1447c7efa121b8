"""The exact schedule: a constraint program for OR-Tools' CP-SAT, warm-started with the best plan known.

A start time for each F, I and W; one action at a time on a rank; what a stage receives has arrived; micro-batches in
order (see `Step`); each rank's first action as soon as its input is there, as a plan's always is; what a rank holds
within its cap. Minimised is the largest, over the ranks, of the last end less the first start (with a barrier: the last
end).

OR-Tools is the optional extra `solver`. One worker, a fixed seed and a limit in CP-SAT's deterministic time make the
result the same at every call.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ...errors import InputError
from ..actions import Action, ActionKind
from ..order import link, run_order
from ..plan import Plan
from .problem import F, I, Problem, W, plan_of_steps

__all__ = ["have_solver", "solve_exactly"]

_KINDS = {ActionKind.F: F, ActionKind.I: I, ActionKind.W: W}
_LARGEST = 1_000_000  # of the integers that stand for times and sizes


def have_solver() -> bool:
    """Whether OR-Tools is installed."""
    return importlib.util.find_spec("ortools") is not None


def solve_exactly(problem: Problem, known: Plan, *, bound: float, limit: float, seed: int) -> tuple[Plan | None, float]:
    """The best plan found, and a lower bound of at least `bound` for split plans; (None, bound) if the time was too short.

    `known` is a split plan, micro-batches in order. The bound holds for plans that keep that order. `limit` is in units
    of CP-SAT's deterministic time, each about a second. Times that are 0, or next to nothing beside the largest, are
    refused as if the time had been too short. Raises InputError without OR-Tools.
    """
    if not have_solver():
        raise InputError("solver='exact' needs OR-Tools: pip install 'twobp-fx[solver]', or use solver='greedy'")
    from ortools.sat.python import cp_model

    model = _Model(cp_model.CpModel(), problem, known, bound)
    if not all(map(all, model.times)):
        return None, bound  # actions without length have no order among themselves, and a plan is one
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, bound
    return model.plan(solver), max(bound, float(Fraction(round(solver.best_objective_bound)) / model.scale))


class _Model:
    def __init__(self, model: Any, problem: Problem, known: Plan, bound: float) -> None:
        self.model = model
        self.problem = problem
        self.scale, is_exact = _scale([time for times in (*problem.times, *problem.delays) for time in times])
        self.times = tuple(_integers(times, self.scale) for times in problem.times)
        self.delays = tuple(_integers(delays, self.scale) for delays in problem.delays)
        hints = self._start_times(known)

        self.horizon = max(start + self.times[_KINDS[action.kind]][action.stage] for action, start in hints.items())
        self.starts = {action: model.new_int_var(0, self.horizon, str(action)) for action in hints}
        for action, start in hints.items():
            model.add_hint(self.starts[action], start)
        self.hints = hints
        for own in problem.stages_of_rank:
            model.add_no_overlap(
                model.new_fixed_size_interval_var(start, self.times[_KINDS[action.kind]][action.stage], f"run {action}")
                for action, start in self.starts.items()
                if action.stage in own
            )
        self._add_dependencies()
        for rank in range(problem.ranks):
            self._add_memory(rank)
        # Rounding times down keeps the bound a bound. It may be rounded up where no time had to be rounded.
        scaled = Fraction(bound) * self.scale
        least = math.ceil(scaled - Fraction(1, 1000)) if is_exact else math.floor(scaled)
        self._add_objective(least)

    def plan(self, solver: Any) -> Plan:
        """The plan that `solver` found."""
        rows = []
        for own in self.problem.stages_of_rank:
            actions = [action for action in self.starts if action.stage in own]
            actions.sort(key=lambda action: solver.value(self.starts[action]))
            rows.append([(_KINDS[action.kind], action.stage) for action in actions])
        return plan_of_steps(rows)

    def _start(self, kind: ActionKind, stage: int, microbatch: int) -> Any:
        return self.starts[Action(stage, kind, microbatch)]

    def _after(self, kind: ActionKind, stage: int, microbatch: int, delay: int = 0) -> Any:
        return self._start(kind, stage, microbatch) + self.times[_KINDS[kind]][stage] + delay

    def _source(self, action: Action) -> tuple[Action, int] | None:
        """The action whose value `action` receives, and how long the value is under way."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == ActionKind.W:
            return Action(stage, ActionKind.I, microbatch), 0
        if kind == ActionKind.I and stage == self.problem.stages - 1:
            return Action(stage, ActionKind.F, microbatch), 0
        if kind == ActionKind.F and not stage:
            return None
        source = stage + 1 if kind == ActionKind.I else stage - 1
        return Action(source, kind, microbatch), self.delays[_KINDS[kind]][source]

    def _start_times(self, plan: Plan) -> dict[Action, int]:
        """When the actions of `plan` start, in the integers."""
        starts: dict[Action, int] = {}
        free_at = [0] * self.problem.ranks
        for rank, position in run_order(plan, link(plan)):
            action = plan.ranks[rank][position]
            received = self._source(action)
            if received:
                source, delay = received
                free_at[rank] = max(free_at[rank], starts[source] + self.times[_KINDS[source.kind]][source.stage] + delay)
            starts[action] = free_at[rank]
            free_at[rank] += self.times[_KINDS[action.kind]][action.stage]
        return starts

    def _add_dependencies(self) -> None:
        for action, start in self.starts.items():
            if action.microbatch:
                self.model.add(start >= self._after(action.kind, action.stage, action.microbatch - 1))
            received = self._source(action)
            if received:
                source, delay = received
                self.model.add(start >= self._after(source.kind, source.stage, source.microbatch, delay))

    def _add_memory(self, rank: int) -> None:
        problem = self.problem
        own = problem.stages_of_rank[rank]
        saved, held = problem.saved[own[0]], problem.held[own[0]]
        if len(own) == 1 and saved == held:  # in order: one micro-batch goes before the next one comes
            at_once = math.floor(problem.capacity[rank] / saved) if saved else problem.microbatches
            for k in range(at_once, problem.microbatches):
                self.model.add(self._start(ActionKind.F, own[0], k) >= self._after(ActionKind.W, own[0], k - at_once))
            return
        # Amounts are rounded down, the cap up: what is found is checked by the caller, what is proven must hold.
        cap = problem.memory_cap[rank]
        scale, _ = _scale([cap, *problem.saved, *problem.held])
        intervals, demands = [], []
        for stage in own:
            saved, held = _integers((problem.saved[stage], problem.held[stage]), scale)
            for k in range(problem.microbatches):
                forward, inputs, weights = (Action(stage, kind, k) for kind in (ActionKind.F, ActionKind.I, ActionKind.W))
                # Two parts that overlap are easier on the solver than one after the other.
                for last, demand in ((weights, min(saved, held)), (inputs, max(0, saved - held))):
                    if demand:
                        intervals.append(self._interval(forward, last))
                        demands.append(demand)
                if held > saved:
                    intervals.append(self._interval(inputs, weights, from_end=True))
                    demands.append(held - saved)
        self.model.add_cumulative(intervals, demands, math.ceil(_fraction(cap) * scale))

    def _interval(self, first: Action, last: Action, *, from_end: bool = False) -> Any:
        """From the start of `first`, or from its end, to the end of `last`."""
        skipped = self.times[_KINDS[first.kind]][first.stage] if from_end else 0
        length = self.model.new_int_var(0, self.horizon, f"length {first} {last}")
        hint = self.hints[last] + self.times[_KINDS[last.kind]][last.stage] - self.hints[first] - skipped
        self.model.add_hint(length, hint)
        end = self._after(last.kind, last.stage, last.microbatch)
        return self.model.new_interval_var(self.starts[first] + skipped, length, end, f"hold {first} {last}")

    def _add_objective(self, least: int) -> None:
        problem = self.problem
        objective = self.model.new_int_var(least, max(self.horizon, least), "time")
        arrival = 0
        for rank, own in enumerate(problem.stages_of_rank):
            first = own[0]
            if rank:
                previous = problem.stages_of_rank[rank - 1][0]
                arrival += self.times[F][previous] + self.delays[F][previous]
            self.model.add(self._start(ActionKind.F, first, 0) == arrival)
            for stage in own:
                start = 0 if problem.barrier else arrival
                self.model.add(objective >= self._after(ActionKind.W, stage, problem.microbatches - 1) - start)
        self.model.minimize(objective)


def _integers(numbers: Sequence[float], scale: Fraction) -> tuple[int, ...]:
    return tuple(math.floor(_fraction(number) * scale) for number in numbers)


def _scale(numbers: Sequence[float]) -> tuple[Fraction, bool]:
    """What turns the numbers into integers, and whether it does so without rounding."""
    fractions = [_fraction(number) for number in numbers if number]
    if not fractions:
        return Fraction(1), True
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    exact = Fraction(denominator, math.gcd(*(int(fraction * denominator) for fraction in fractions)))
    if max(fractions) * exact <= _LARGEST:
        return exact, True
    return _LARGEST / max(fractions), False


def _fraction(number: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(repr(float(number)))
