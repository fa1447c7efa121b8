"""`find_plan`: its plans, its bound, and its optimum against enumeration and against published figures."""

import math
import random
from itertools import product

import pytest

from twobp_fx.errors import InputError, PlanError
from twobp_fx.schedules import SCHEDULES, Action, ActionKind, Costs, Plan, build, find_plan, looped, simulate, v_shape, validate
from twobp_fx.schedules.automatic import find
from twobp_fx.schedules.automatic.exact import have_solver

F, I, W, B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B

needs_solver = pytest.mark.skipif(not have_solver(), reason="needs OR-Tools, the extra 'solver'")

MEASURED = {"forward": 18.522, "backward_input": 18.086, "backward_weight": 9.337, "comm": 0.601}
"""Milliseconds: the 1.5B model of arXiv 2401.10241 on 8 ranks, as in its table of bubble ratios at 24 micro-batches."""

HELD = 32 / (34 + 5 * 24 * 1024 / 2304)
"""That paper's M_W / M_B of a transformer layer, 32 sbh / (34 sbh + 5 a s^2 b), with its 24 heads, sequence 1024, width 2304."""


def measured(held: float = 1) -> Costs:
    return Costs(**MEASURED, saved=1, held_for_weight=held)


def check(found, costs: Costs, cap, *, barrier: bool = False) -> None:
    """What is said of every found plan, measured anew."""
    validate(found.plan, memory_cap=cap, costs=costs)
    sim = simulate(found.plan, costs)
    assert (found.longest_stage, found.makespan, found.peak_memory) == (sim.longest_stage, sim.makespan, sim.peak_memory)
    time = sim.makespan if barrier else sim.longest_stage
    assert found.lower_bound <= time * (1 + 1e-9)
    assert found.gap == pytest.approx(time / found.lower_bound - 1 if found.lower_bound else 0, abs=1e-8)
    assert found.plan.name == "auto"


class TestPublishedFigures:
    """p = 8, m = 24 and the measured costs of arXiv 2401.10241; bubble ratio of the longest stage."""

    def ratio(self, plan: Plan) -> float:
        return 1 - 24 * (18.522 + 18.086 + 9.337) / simulate(plan, Costs(**MEASURED)).longest_stage

    def test_the_measure(self):
        """The same measure gives the published 1F1B 0.243, ZB-H1 0.159, ZB-H2 0.108."""
        assert round(self.ratio(build("1f1b", ranks=8, microbatches=24, split_backward=False)), 3) == 0.243
        assert round(self.ratio(build("zb-h1", ranks=8, microbatches=24)), 3) == 0.159
        assert round(self.ratio(build("zb-h2", ranks=8, microbatches=24)), 3) == 0.108

    @pytest.mark.parametrize("held", [1, HELD])
    def test_memory_of_1f1b(self, held):
        """At most 0.159 in 1F1B's largest memory, p on every rank. 0.1585 is optimal: rank 0 idles for (p - 1) (F + I - W)
        and more, in the warm-up and the cooldown, whatever the order."""
        found = find_plan(ranks=8, microbatches=24, costs=measured(held), memory_cap=8, solver="greedy")
        check(found, measured(held), 8)
        assert found.bubble_ratio == pytest.approx(self.ratio(found.plan))
        assert found.bubble_ratio <= 0.159
        assert (round(found.bubble_ratio, 4), found.gap) == (0.1585, 0)

    def test_memory_of_1f1b_rank_by_rank(self):
        """With p - i + 1 on rank i, as 1F1B has it, 0.1936 is optimal: the last rank cannot hold any W back."""
        cap = [8 - rank for rank in range(8)]
        found = find_plan(ranks=8, microbatches=24, costs=measured(), memory_cap=cap, solver="greedy")
        check(found, measured(), cap)
        assert (round(found.bubble_ratio, 4), found.gap) == (0.1936, 0)

    @pytest.mark.parametrize("held", [HELD, 0.65])
    def test_twice_the_memory(self, held):
        """At most 0.05 in twice 1F1B's memory, with M_W below M_B. 0.0433 is optimal, and the paper's ZB-2p: the last rank
        runs all F and I before any W, and the last I goes back up."""
        found = find_plan(ranks=8, microbatches=24, costs=measured(held), memory_cap=16, solver="greedy")
        check(found, measured(held), 16)
        assert found.bubble_ratio == pytest.approx(self.ratio(found.plan))
        assert found.bubble_ratio <= 0.05
        assert round(found.bubble_ratio, 4) == 0.0433
        assert found.lower_bound == pytest.approx(7 * (18.522 + 0.601) + 24 * (18.522 + 18.086) + 7 * (18.086 + 0.601) + 9.337)

    def test_twice_the_memory_if_all_of_it_is_held_until_w(self):
        """With M_W = M_B, 0.05 is out of reach: 0.1015 is optimal, and the bound says so.

        The last rank holds at most 16 micro-batches, so that it runs 8 of its 24 W before its last F, and so before its
        last I, which rank 0 waits for. 0.05 leaves time for none, which takes M_W <= 15/23 M_B.
        """
        found = find_plan(ranks=8, microbatches=24, costs=measured(), memory_cap=16, solver="greedy")
        check(found, measured(), 16)
        without = 7 * (18.522 + 0.601) + 24 * (18.522 + 18.086) + 7 * (18.086 + 0.601) + 9.337
        assert found.lower_bound == pytest.approx(without + 8 * 9.337)
        assert (round(found.bubble_ratio, 4), found.gap) == (0.1015, 0)

    @pytest.mark.parametrize(("ranks", "microbatches", "longest"), [(4, 8, 24), (8, 24, 72)])
    def test_a_v_has_no_bubble(self, ranks, microbatches, longest):
        costs = Costs(0.5, 0.5, 0.5)
        found = find_plan(ranks=ranks, microbatches=microbatches, chunks=2, costs=costs)
        check(found, costs, ranks)
        assert (found.longest_stage, found.bubble_ratio, found.gap, found.method) == (longest, 0, 0, "zb-v")
        assert [found.plan.rank_of_stage(stage) for stage in range(2 * ranks)] == list(v_shape(ranks).rank_of_stage)


def every_row(stage: int, kinds_of: tuple[tuple[ActionKind, ...], ...], done: tuple[int, ...] = ()) -> list[tuple[Action, ...]]:
    """All orders of a stage's actions in which each micro-batch k runs `kinds_of[k]` in order."""
    done = done or (0,) * len(kinds_of)
    rows = []
    for k, kinds in enumerate(kinds_of):
        if done[k] < len(kinds):
            rest = every_row(stage, kinds_of, (*done[:k], done[k] + 1, *done[k + 1 :]))
            rows += [(Action(stage, kinds[done[k]], k), *row) for row in rest]
    return rows or [()]


def in_order(row: tuple[Action, ...]) -> bool:
    return all(
        [a.microbatch for a in row if a.kind == kind] == sorted(a.microbatch for a in row if a.kind == kind) for kind in "FIW"
    )


def least_time(rows_by_rank, costs: Costs, cap: float, *, barrier: bool) -> float:
    best = math.inf
    for rows in product(*rows_by_rank):
        try:
            sim = simulate(Plan("p", rows), costs)
        except PlanError:
            continue  # deadlocks
        if max(sim.peak_memory) <= cap:
            best = min(best, sim.makespan if barrier else sim.longest_stage)
    return best


ODD = Costs(forward=(2, 3), backward_input=(4, 1), backward_weight=(1, 3), comm=(0.5, 0.25))


@needs_solver
class TestOptimum:
    @pytest.mark.parametrize("barrier", [True, False])
    @pytest.mark.parametrize("cap", [1, 2])
    @pytest.mark.parametrize("costs", [Costs(), ODD, Costs(saved=1, held_for_weight=0.5, backward_weight=3)])
    def test_all_plans_of_two_by_two(self, costs, cap, barrier):
        """Every order, those with micro-batches out of order, too."""
        rows = [every_row(stage, ((F, I, W),) * 2) for stage in range(2)]
        found = find_plan(ranks=2, microbatches=2, costs=costs, memory_cap=cap, solver="exact", barrier=barrier)
        check(found, costs, cap, barrier=barrier)
        assert found.gap == 0
        assert (found.makespan if barrier else found.longest_stage) == least_time(rows, costs, cap, barrier=barrier)

    @pytest.mark.parametrize("cap", [1, 2])
    def test_all_plans_of_two_by_two_with_b(self, cap):
        """Where B costs less than I and W, plans may mix the two."""
        costs = Costs(backward_input=2, backward_weight=2, backward=3)
        forms = list(product(((F, I, W), (F, B)), repeat=2))
        rows = [[row for form in forms for row in every_row(stage, form)] for stage in range(2)]
        found = find_plan(ranks=2, microbatches=2, costs=costs, memory_cap=cap)
        check(found, costs, cap)
        least = least_time(rows, costs, cap, barrier=False)
        assert found.lower_bound <= least
        assert found.longest_stage == least

    @pytest.mark.parametrize("cap", [1, 2, 3])
    def test_all_plans_of_two_by_three(self, cap):
        rows = [[row for row in every_row(stage, ((F, I, W),) * 3) if in_order(row)] for stage in range(2)]
        assert [len(row) for row in rows] == [42, 42]
        found = find_plan(ranks=2, microbatches=3, costs=ODD, memory_cap=cap, solver="exact")
        check(found, ODD, cap)
        assert (found.longest_stage, found.gap) == (least_time(rows, ODD, cap, barrier=False), 0)

    @pytest.mark.parametrize("cap", [1, 2])
    def test_all_plans_of_three_by_two(self, cap):
        costs = Costs(forward=(1, 3, 2), backward_input=(2, 2, 1), backward_weight=(3, 1, 2), comm=0.5)
        rows = [[row for row in every_row(stage, ((F, I, W),) * 2) if in_order(row)] for stage in range(3)]
        found = find_plan(ranks=3, microbatches=2, costs=costs, memory_cap=cap, solver="exact")
        check(found, costs, cap)
        assert (found.longest_stage, found.gap) == (least_time(rows, costs, cap, barrier=False), 0)

    @pytest.mark.parametrize("barrier", [True, False])
    def test_the_solver_proves_small_ones(self, barrier):
        """Random costs for 2 or 3 ranks and 2 to 4 micro-batches, sizes and several stages a rank included."""
        draw = random.Random(0)
        for _ in range(10):
            ranks, chunks = draw.choice([2, 3]), draw.choice([1, 1, 2])
            stages = ranks * chunks
            drawn = [[draw.randint(1, 9) for _ in range(stages)] for _ in range(6)]
            held = [min(pair) for pair in zip(drawn[4], drawn[5], strict=True)]
            costs = Costs(*drawn[:3], comm=[t / 4 for t in drawn[3]], saved=drawn[4], held_for_weight=held)
            own = map(looped(ranks, chunks).stages_of_rank, range(ranks))
            cap = [sum(drawn[4][stage] for stage in stages) * draw.choice([1, 1.5, 2, 3]) for stages in own]
            microbatches = draw.randint(2, 4)
            kwargs = {"ranks": ranks, "microbatches": microbatches, "costs": costs, "memory_cap": cap, "chunks": chunks}
            found = find_plan(**kwargs, placement="looped", barrier=barrier, solver="exact", time_limit=2)
            check(found, costs, cap, barrier=barrier)
            assert found.gap == 0
            greedy = find_plan(**kwargs, placement="looped", barrier=barrier, solver="greedy", time_limit=1)
            check(greedy, costs, cap, barrier=barrier)
            assert greedy.lower_bound <= found.lower_bound * (1 + 1e-9)

    def test_better_than_list_scheduling(self):
        """A case in which no policy that is tried is optimal, and the constraint program is."""
        costs = Costs(forward=(2, 3, 3), backward_input=(2, 2, 3), backward_weight=(4, 4, 2), comm=1)
        greedy = find_plan(ranks=3, microbatches=8, costs=costs, solver="greedy", time_limit=1)
        exact = find_plan(ranks=3, microbatches=8, costs=costs, solver="exact", time_limit=2)
        check(greedy, costs, 3)
        check(exact, costs, 3)
        assert (exact.method, exact.gap) == ("CP-SAT", 0)
        assert exact.longest_stage < greedy.longest_stage


class TestEveryPlan:
    def test_valid_bounded_and_no_worse_than_the_catalog(self):
        draw = random.Random(1)
        for _ in range(40):
            ranks, chunks = draw.choice([1, 2, 3, 4, 5]), draw.choice([1, 1, 2, 3])
            microbatches = draw.choice([1, 2, 4, 5, 8, 10])
            stages = ranks * chunks
            costs = Costs(
                *([draw.uniform(0.5, 2) for _ in range(stages)] for _ in range(3)),
                backward=draw.choice([None, 1.5]),
                comm=draw.choice([0, 0.3]),
                batched_weight=draw.choice([None, None, (1, 1.5)]),
                **draw.choice([{}, {"saved": 1 / chunks, "held_for_weight": [draw.choice([0, 0.5, 1.5]) / chunks] * stages}]),
            )
            cap, barrier = draw.choice([1.5, 2, ranks + 1, 2 * ranks]), draw.random() < 0.5
            kwargs = {"ranks": ranks, "microbatches": microbatches, "costs": costs, "memory_cap": cap, "chunks": chunks}
            found = find_plan(**kwargs, barrier=barrier, solver="greedy", time_limit=0.1)
            check(found, costs, cap, barrier=barrier)
            time = found.makespan if barrier else found.longest_stage
            assert found.plan.stages == stages
            assert found.plan.microbatches == microbatches
            for name, schedule in SCHEDULES.items():
                for split in (True, False):
                    if name == "auto" or (schedule.always_split and not split):
                        continue
                    try:
                        plan = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks, split_backward=split)
                    except PlanError:
                        continue
                    sim = simulate(plan, costs)
                    assert (
                        found.lower_bound <= (sim.makespan if barrier else sim.longest_stage) * (1 + 1e-9)
                        or max(sim.peak_memory) > cap
                    )
                    if max(sim.peak_memory) <= cap:
                        assert time <= (sim.makespan if barrier else sim.longest_stage)

    def test_b_where_it_costs_less(self):
        """1F1B with B at no gain is beaten by the split; at a third off, B goes wherever it delays nobody."""
        costs = Costs(backward=1.5)
        found = find_plan(ranks=4, microbatches=8, costs=costs, solver="greedy", time_limit=1)
        check(found, costs, 4)
        kinds = {action.kind for row in found.plan.ranks for action in row}
        assert kinds == {F, I, W, B}
        split = find_plan(ranks=4, microbatches=8, solver="greedy")
        assert found.longest_stage < split.longest_stage

    def test_the_same_plan_every_time(self):
        kwargs = {"ranks": 4, "microbatches": 8, "costs": Costs(1.3, 1.1, 0.7, comm=0.2), "memory_cap": 3, "time_limit": 0.5}
        assert find_plan(**kwargs) == find_plan(**kwargs)

    def test_a_large_one(self):
        """32 ranks and 256 micro-batches: one try of list scheduling is a few seconds at most."""
        found = find_plan(ranks=32, microbatches=256, costs=Costs(**MEASURED), memory_cap=64, time_limit=0.1)
        check(found, Costs(**MEASURED), 64)
        assert found.gap < 0.01

    def test_times_of_nothing(self):
        found = find_plan(ranks=3, microbatches=4, costs=Costs(0, 0, 0))
        assert (found.makespan, found.bubble_ratio, found.lower_bound, found.gap) == (0, 0, 0, 0)
        assert find_plan(ranks=3, microbatches=4, costs=Costs(1, 0, 0)).lower_bound == 6

    def test_caps_in_bytes(self):
        """The default cap is what 1F1B's first rank holds, in bytes where the costs have sizes."""
        costs = Costs(saved=(100, 200), held_for_weight=(50, 250))
        found = find_plan(ranks=2, microbatches=6, costs=costs)
        check(found, costs, [200, 500])
        assert found.peak_memory <= (200, 500)
        with pytest.raises(InputError, match="memory_cap of rank 1 is 249; it must be a finite number of at least 250"):
            find_plan(ranks=2, microbatches=6, costs=costs, memory_cap=249)


class TestAuto:
    @pytest.mark.parametrize(("ranks", "microbatches", "longest"), [(1, 3, 9), (2, 1, 5), (4, 8, 27), (8, 24, 79)])
    def test_by_name(self, ranks, microbatches, longest):
        """At equal times and 1F1B's memory ZB-H1's makespan is optimal."""
        plan = build("auto", ranks=ranks, microbatches=microbatches)
        validate(plan, memory_cap=ranks)
        assert plan.name == "auto"
        assert simulate(plan).longest_stage == longest

    def test_by_name_in_chunks(self):
        plan = build("auto", ranks=4, microbatches=8, chunks=2)
        validate(plan, memory_cap=4)
        assert simulate(plan).longest_stage == 48
        with pytest.raises(PlanError, match="always split"):
            build("auto", ranks=4, split_backward=False)

    def test_without_the_solver(self, monkeypatch):
        """auto does without, exact says what to install."""
        monkeypatch.setattr(find, "have_solver", lambda: False)
        assert find_plan(ranks=3, microbatches=4, costs=Costs(2, 1, 3), memory_cap=2, time_limit=0.5).method == "list scheduling"
        with pytest.raises(InputError, match=r"pip install 'twobp-fx\[solver\]', or use solver='greedy'"):
            find_plan(ranks=3, microbatches=4, solver="exact")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be a whole number of at least 1"),
        ({"microbatches": 2.5}, r"microbatches is 2\.5; it must be a whole number"),
        ({"chunks": True}, "chunks is True; it must be a whole number"),
        ({"ranks": 10**6, "microbatches": 10**6}, "more than 4000000 actions; use fewer"),
        ({"memory_cap": 0.5}, r"memory_cap of rank 0 is 0\.5; it must be a finite number of at least 1, what one micro-batch"),
        ({"memory_cap": [2, 1, math.nan]}, "memory_cap of rank 2 is nan"),
        ({"memory_cap": [2, 2]}, "memory_cap has 2 entries, but there are 3 ranks"),
        ({"memory_cap": "2"}, "memory_cap"),
        ({"placement": "v"}, "placement 'v' puts two stages on each rank, not 1"),
        ({"placement": "ring"}, "placement is 'ring'; use 'looped', 'v' or None"),
        ({"solver": "best"}, "solver is 'best'; use 'auto', 'greedy' or 'exact'"),
        ({"time_limit": 0}, "time_limit is 0; it must be a positive number of seconds"),
        ({"costs": Costs(forward=(1, 2))}, r"Costs\.forward has 2 entries, but the plan has 3 stages"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(InputError, match=message):
        find_plan(**{"ranks": 3, "microbatches": 4, **change})
