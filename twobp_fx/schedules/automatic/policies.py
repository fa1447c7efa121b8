"""List scheduling with a policy, and a search over policies.

A rank that is free runs the first of its policy's (kind, chunk) that can start now. F cannot where memory is full, or
where the stage already has as many micro-batches in flight as the policy allows. If none can start, the rank runs a W,
unless something else arrives soon enough to be worth the wait. W also runs first, whatever there is, where more of them
are pending than the policy allows.

The heuristics of "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, section 3.1) are among the policies: as many
forwards before the first I as memory allows, then I and F in turn, W in gaps that are long enough or when memory is full.

Every run ends with a complete plan within the cap. A rank keeps one place free for each of a micro-batch's deeper stages
on that rank, W can always run to make room, and the last stage turns every F into an I.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations, product
from operator import itemgetter

from .problem import F, I, Problem, Step, W

__all__ = ["Policy", "Rows", "list_schedule", "search_policies"]

_STARTS = 20  # climbs
_STALE = 150  # changes in a row without a gain, after which a climb ends
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Policy:
    """How a rank chooses. Chunk c is the c-th of the rank's stages."""

    order: tuple[Step, ...]
    """(F or I, chunk), what runs first coming first."""
    in_flight: tuple[int, ...]
    """For each stage, the most micro-batches between F and I."""
    pending: tuple[int, ...]
    """For each rank, the most W that wait while there is anything else to run."""
    patience: float
    """The part of a W's time by which it may delay what arrives while it runs: 0 to 1."""


Rows = tuple[tuple[Step, ...], ...]
"""Each rank's steps, in order."""


def search_policies(problem: Problem, *, target: float, budget: int, seed: int) -> tuple[float, Rows]:
    """The best time found, and the steps that take it: a sweep over simple policies, then climbs from the best of them.

    Stops at `target`, or when the schedules tried have had `budget` actions; at least one is tried. Counting actions, not
    seconds, makes the result the same on every machine.
    """
    search = _Search(problem, target * (1 + 1e-9), max(1, budget // problem.actions))
    tried = [(search.run(policy), policy) for policy in islice(_sweep(problem), max(1, search.runs_left // 2))]
    draw = random.Random(seed)
    for time, policy in sorted(tried, key=itemgetter(0))[:_STARTS]:
        search.climb(time, policy, draw)
    return search.time, search.rows


class _Search:
    """The best so far, and how many more policies may be tried."""

    def __init__(self, problem: Problem, target: float, runs: int) -> None:
        self.problem = problem
        self.target = target
        self.runs_left = runs
        self.time = math.inf
        self.rows: Rows = ()

    @property
    def done(self) -> bool:
        return self.time <= self.target or self.runs_left <= 0

    def run(self, policy: Policy) -> float:
        """The policy's time; infinite, without a run, if the search is done."""
        if self.done:
            return math.inf
        self.runs_left -= 1
        time, rows = list_schedule(self.problem, policy)
        if time < self.time:
            self.time, self.rows = time, rows
        return time

    def climb(self, time: float, policy: Policy, draw: random.Random) -> None:
        """Change the policy at random, and keep each change that does no harm."""
        stale = 0
        while stale < _STALE and not self.done:
            changed = _change(policy, self.problem, draw)
            changed_time = self.run(changed)
            stale = 0 if changed_time < time * (1 - 1e-9) else stale + 1
            if changed_time <= time * (1 + 1e-9):
                time, policy = changed_time, changed


def _sweep(problem: Problem) -> Iterator[Policy]:
    """Simple policies: as many micro-batches in flight as 1F1B has, up to three times that, and every order."""
    everything = (problem.microbatches * problem.chunks,) * problem.ranks
    depths = dict.fromkeys(
        tuple(max(1, round(factor * (problem.stages - stage) / problem.chunks) + more) for stage in range(problem.stages))
        for factor, more in product((1.0, 1.5, 2.0, 1.25, 3.0), (0, 1))
    )
    for in_flight, order, patience in product(depths, _orders(problem.chunks), (0.0, 0.5, 1.0)):
        yield Policy(order, in_flight, everything, patience)


def _orders(chunks: int) -> list[tuple[Step, ...]]:
    """Every order of a rank's kinds and chunks; for three chunks and more, deepest first or last."""
    if chunks <= 2:
        return list(permutations((kind, chunk) for kind in (I, F) for chunk in reversed(range(chunks))))
    deepest_first = range(chunks)[::-1]
    return [
        tuple((kind, chunk) for kind, chunks_of_kind in blocks for chunk in chunks_of_kind)
        for inputs, forwards in product((deepest_first, deepest_first[::-1]), repeat=2)
        for blocks in permutations(((I, inputs), (F, forwards)))
    ]


def _change(policy: Policy, problem: Problem, draw: random.Random) -> Policy:
    """The policy with one to three of its numbers changed."""
    most = problem.microbatches * problem.chunks
    in_flight, pending, order, patience = list(policy.in_flight), list(policy.pending), list(policy.order), policy.patience
    for _ in range(draw.choice((1, 1, 2, 3))):
        what = draw.random()
        if what < 0.5:
            stage = draw.randrange(problem.stages)
            in_flight[stage] = min(most, max(1, in_flight[stage] + draw.choice((-1, 1))))
        elif what < 0.85:
            rank = draw.randrange(problem.ranks)
            pending[rank] = min(most, max(0, pending[rank] + draw.choice((-3, -1, 1, 3))))
        elif what < 0.95:
            patience = draw.choice((0.0, 0.25, 0.5, 0.75, 1.0))
        else:
            first, second = draw.sample(range(len(order)), 2)
            order[first], order[second] = order[second], order[first]
    return Policy(tuple(order), tuple(in_flight), tuple(pending), patience)


def list_schedule(problem: Problem, policy: Policy) -> tuple[float, Rows]:
    """The schedule that `policy` makes: its time (longest stage; with a barrier, makespan), and each rank's steps."""
    run = _Run(problem, policy)
    events = [(0.0, rank) for rank in range(problem.ranks)]  # when a rank may have something to start: a heap
    while events:
        now, rank = heapq.heappop(events)
        if now >= run.free_at[rank] - _EPSILON:
            run.advance(now, rank, events)
    assert sum(map(len, run.rows)) == problem.actions
    starts = [0.0] * problem.ranks if problem.barrier else run.first_start
    time = max(end - start for start, end in zip(starts, run.free_at, strict=True))
    return time, tuple(map(tuple, run.rows))


class _Run:
    """The state of one list scheduling; what is counted by kind has an entry for F, I and W, in this order."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        ranks, stages = problem.ranks, problem.stages
        self.problem = problem
        self.policy = policy
        self.turns = [[(kind, own[chunk], chunk) for kind, chunk in policy.order] for own in problem.stages_of_rank]
        # What a micro-batch is counted as until I: so much that I can never exceed the cap.
        self.counted = tuple(map(max, problem.saved, problem.held))
        # The most that a rank may hold before an F of its chunk c: its deeper stages keep a place.
        self.room = [
            [cap - sum(self.counted[stage] for stage in own[chunk:]) for chunk in range(problem.chunks)]
            for own, cap in zip(problem.stages_of_rank, problem.capacity, strict=True)
        ]
        self.counts = [[0] * stages for _ in range(3)]
        self.arrivals: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in (F, I)]
        self.arrivals[F][0] = [0.0] * problem.microbatches
        self.held = [0.0] * ranks
        self.waiting = [0] * ranks  # pending W
        self.free_at = [0.0] * ranks
        self.first_start = [0.0] * ranks
        self.rows: list[list[Step]] = [[] for _ in range(ranks)]

    def advance(self, now: float, rank: int, events: list[tuple[float, int]]) -> None:
        """Start what the free `rank` should run at `now`, if anything; add the events that follow from it."""
        chosen, next_arrival, full = self._choose(now, rank)
        if chosen is None and self.waiting[rank]:
            weight = self._weight_of(rank)
            delay = (1 - self.policy.patience) * self.problem.times[W][weight[1]]
            if full or now + delay <= next_arrival + _EPSILON:
                chosen = weight
        if chosen is not None:
            self._start(chosen, now, rank, events)
        elif next_arrival < math.inf:
            heapq.heappush(events, (next_arrival, rank))

    def _choose(self, now: float, rank: int) -> tuple[Step | None, float, bool]:
        """What runs now, if it is no W of its own accord; when else something arrives; whether memory keeps an F back."""
        if self.waiting[rank] > self.policy.pending[rank]:
            return self._weight_of(rank), math.inf, False
        next_arrival, full = math.inf, False
        forwards, inputs, _ = self.counts
        for kind, stage, chunk in self.turns[rank]:
            number = self.counts[kind][stage]
            arrivals = self.arrivals[kind][stage]
            if number >= len(arrivals):
                continue
            arrived = arrivals[number] <= now + _EPSILON
            if kind == F:
                if forwards[stage] - inputs[stage] >= self.policy.in_flight[stage]:
                    continue
                if self.held[rank] > self.room[rank][chunk]:
                    full = full or arrived
                    continue
            if arrived:
                return (kind, stage), next_arrival, full
            next_arrival = min(next_arrival, arrivals[number])
        return None, next_arrival, full

    def _weight_of(self, rank: int) -> Step:
        """The pending W of the deepest stage that has one."""
        _, inputs, weights = self.counts
        return W, next(stage for stage in reversed(self.problem.stages_of_rank[rank]) if weights[stage] < inputs[stage])

    def _start(self, step: Step, now: float, rank: int, events: list[tuple[float, int]]) -> None:
        kind, stage = step
        problem = self.problem
        if not self.rows[rank]:
            self.first_start[rank] = now
        self.counts[kind][stage] += 1
        end = self.free_at[rank] = now + self._duration(step, rank)
        self.rows[rank].append(step)
        heapq.heappush(events, (end, rank))
        if kind == W:
            self.waiting[rank] -= 1
            self.held[rank] -= problem.held[stage]
            return
        if kind == F:
            self.held[rank] += self.counted[stage]
        else:
            self.waiting[rank] += 1
            self.held[rank] -= self.counted[stage] - problem.held[stage]
        if kind == F and stage + 1 == problem.stages:
            self.arrivals[I][stage].append(end)
        elif kind == F or stage:
            receiver = stage + 1 if kind == F else stage - 1
            self.arrivals[kind][receiver].append(end + problem.delays[kind][stage])
            home = problem.placement.rank_of_stage[receiver]
            heapq.heappush(events, (max(now, self.free_at[home]), home))

    def _duration(self, step: Step, rank: int) -> float:
        kind, stage = step
        adds = self.problem.weight_batches[stage]
        if kind != W or len(adds) == 1:
            return self.problem.times[kind][stage]
        adjacent = next((at for at, other in enumerate(reversed(self.rows[rank])) if other != step), len(self.rows[rank]))
        return max(0.0, adds[adjacent % len(adds)])
