"""A time that no plan can beat, from the work, the warm-up, the cooldown and the memory of each rank.

Rank q does not idle by choice only:

- Warm-up. Its first I cannot start before one micro-batch has gone down to the last stage and come back. Until then the
  rank can only run F, and of these no more than its memory holds.
- Cooldown. Its last F is that of the last micro-batch at its deepest stage. The way down and back up from there takes
  its time, and the rank can fill it only with I and W of what it still held at that F.
- Memory. By its last F, all but the micro-batches that then fit in memory have run W.
- Occupancy. Each micro-batch occupies memory for at least its way down and back, and then for W. The sum of it cannot
  exceed the cap times the time; F by F it fills, and W by W it empties.
- Other ranks. The last I of rank q goes on to every stage before it, where W still follows.

With one stage a rank and equal times, the first three alone give ZB-H1's bubble under 1F1B's memory.

All hold for plans with B too, taken for an I and a W that together are no longer than it, and that hold no more than B
does; and for W in batches, where each is taken for as long as in the best batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from .problem import F, I, Problem, W

__all__ = ["lower_bound"]


def lower_bound(problem: Problem) -> float:
    """No plan's longest stage (with a barrier: makespan) is less, in the unit of the costs."""
    bound = _Bound(problem)
    ranks = range(problem.ranks)
    to_last_input, total = zip(*map(bound.of_rank, ranks), strict=True)
    best = 0.0
    for rank in ranks:
        first = problem.stages_of_rank[rank][0]
        time = total[rank]
        for other in ranks:
            source = problem.stages_of_rank[other][0]
            if source > first:
                apart = bound.down[source] - bound.down[first]  # the other rank starts at least so much later
                time = max(time, apart + to_last_input[other] + bound.up[first] - bound.up[source] + bound.times[W][first])
        best = max(best, time + bound.down[first] if problem.barrier else time)
    return best


class _Bound:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        forward, backward_input, _ = problem.times
        inputs = tuple(map(min, backward_input, problem.fused))
        alone = (min(_means(adds)) for adds in problem.weight_batches)
        weights = tuple(max(0.0, min(w, b - i)) for w, b, i in zip(alone, problem.fused, inputs, strict=True))
        self.times = (forward, inputs, weights)
        self.held = tuple(map(min, problem.saved, problem.held))
        to_next, to_previous = problem.delays
        stages = range(problem.stages)
        # From the start of F at stage 0 to the start of F at stage s, and from the end of I at the last stage to that at s.
        self.down = [0.0, *accumulate(forward[s] + to_next[s] for s in stages[:-1])]
        self.up = [0.0, *accumulate(to_previous[s + 1] + inputs[s] for s in reversed(stages[:-1]))][::-1]
        self.turn = forward[-1] + inputs[-1]

    def there_and_back(self, start: int, end: int) -> float:
        """From the start of a micro-batch's F at stage `start` to the end of its I at stage `end`."""
        return self.down[-1] - self.down[start] + self.turn + self.up[end]

    def of_rank(self, rank: int) -> tuple[float, float]:
        """From the first start of `rank`: the least time to the end of its last I, and to its last end."""
        problem = self.problem
        own = problem.stages_of_rank[rank]
        first, deepest = own[0], own[-1]
        at_once = self._most(rank, min(problem.saved[s] for s in own))
        warm_up = self.there_and_back(first, deepest) - self.times[I][deepest] - at_once * max(self.times[F][s] for s in own)
        cooldown = self.there_and_back(deepest, first) - self.times[F][deepest]
        if problem.microbatches * sum(problem.saved[s] for s in own) > problem.capacity[rank]:
            to_last_input, total = self._windows(rank, max(0.0, warm_up), cooldown)  # the first I comes before the last F
        else:  # the two windows may overlap
            either = self._windows(rank, max(0.0, warm_up), 0.0), self._windows(rank, 0.0, cooldown)
            to_last_input, total = (max(pair) for pair in zip(*either, strict=True))
        return to_last_input, max(total, self._occupancy(rank))

    def _most(self, rank: int, each: float, beside: float = 0.0) -> int:
        """How many of a rank's micro-batches can be held at once if each takes so much, beside something else."""
        count = self.problem.microbatches * self.problem.chunks
        return min(count, math.floor((self.problem.capacity[rank] - beside) / each)) if each else count

    def _windows(self, rank: int, warm_up: float, cooldown: float) -> tuple[float, float]:
        """Least times given the idle time of the warm-up, and the time from the end of the last F to that of the last I."""
        problem = self.problem
        own = problem.stages_of_rank[rank]
        forward, inputs, weights = (problem.microbatches * sum(self.times[kind][s] for s in own) for kind in (F, I, W))
        longest_input, longest_weight = (max(self.times[kind][s] for s in own) for kind in (I, W))
        saved, held = (min(amounts[s] for s in own) for amounts in (problem.saved, self.held))
        count = problem.microbatches * len(own)

        to_last_input = total = math.inf
        for open_inputs in range(1, self._most(rank, saved) + 1):  # held at the last F, its own included
            open_weights = min(count, open_inputs + self._most(rank, held, beside=open_inputs * saved))
            inputs_before = max(0.0, inputs - open_inputs * longest_input)
            weights_before = max(0.0, weights - open_weights * longest_weight)
            waiting = inputs_before + weights_before + cooldown
            to_last_input = min(to_last_input, warm_up + forward + max(inputs + weights_before, waiting))
            total = min(total, warm_up + forward + max(inputs + weights, waiting + self.times[W][own[0]]))
        return to_last_input, total

    def _occupancy(self, rank: int) -> float:
        problem = self.problem
        own = problem.stages_of_rank[rank]
        held = problem.microbatches * sum(
            problem.saved[stage] * self.there_and_back(stage, stage) + self.held[stage] * self.times[W][stage] for stage in own
        )
        largest = max(problem.saved[s] for s in own)
        at_once = self._most(rank, largest)
        step = min(self.times[F][s] for s in own) + min(self.times[W][s] for s in own)
        return (held + largest * step * at_once * (at_once - 1) / 2) / problem.memory_cap[rank]


def _means(values: Sequence[float]) -> Iterator[float]:
    """The mean of the first, of the first two, ... of `values`."""
    return (total / count for count, total in enumerate(accumulate(values), start=1))
