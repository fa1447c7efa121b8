"""`simulate` against published numbers: arXiv 2405.18047 (2BP) and arXiv 2401.10241 (zero bubble)."""

import math
from itertools import pairwise

import pytest

from twobp_fx.errors import InputError, PlanError
from twobp_fx.schedules import Costs, Plan, build, simulate

UNIT = Costs(forward=1, backward_input=1, backward_weight=1)

# schedule: (micro-batches, bubble ratio with B unsplit, bubble ratio of 2BP, throughput gain), F = I = W = 1, B = 2
TABLE = {
    "naive": lambda n: (1, (n - 1) / n, 2 * (n - 1) / (2 * n + 1), 3 * n / (2 * n + 1)),
    "gpipe": lambda n: (
        n,
        (n - 1) / (2 * n - 1),
        2 * (n - 1) / (5 * n - 2),
        3 * (2 * n - 1) / (5 * n - 2),
    ),
    "1f1b-1": lambda n: (n, (n - 1) / (2 * n - 1), (n - 1) / (4 * n - 1), 3 * (2 * n - 1) / (4 * n - 1)),
    "1f1b-2": lambda n: (2 * n, (n - 1) / (3 * n - 1), (n - 1) / (7 * n - 1), 3 * (3 * n - 1) / (7 * n - 1)),
}
MAKESPAN = {
    "naive": lambda n: 2 * n + 1,
    "gpipe": lambda n: 5 * n - 2,
    "1f1b-1": lambda n: 4 * n - 1,
    "1f1b-2": lambda n: 7 * n - 1,
}
GAIN_AT_4 = {"naive": 1.333, "gpipe": 1.167, "1f1b-1": 1.400, "1f1b-2": 1.222}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", list(TABLE))
def test_table_of_2bp(name, ranks):
    microbatches, unsplit_bubble, split_bubble, gain = TABLE[name](ranks)
    unsplit = simulate(build(name, ranks=ranks, microbatches=microbatches, split_backward=False), UNIT)
    split = simulate(build(name, ranks=ranks, microbatches=microbatches), UNIT)

    assert split.makespan == MAKESPAN[name](ranks)
    assert unsplit.makespan == pytest.approx(3 * microbatches / (1 - unsplit_bubble))
    assert unsplit.bubble_ratio == pytest.approx(unsplit_bubble)
    assert split.bubble_ratio == pytest.approx(split_bubble)
    assert unsplit.makespan / split.makespan == pytest.approx(gain)
    if ranks == 4:
        assert round(unsplit.makespan / split.makespan, 3) == GAIN_AT_4[name]


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 24), (3, 5), (1, 4), (16, 16)])
def test_unsplit_1f1b(ranks, microbatches):
    """Bubble (p-1)(T_F+T_I+T_W), ratio (p-1)/(m+p-1), and p-i+1 micro-batches held on rank i, counted from 1."""
    costs = Costs(forward=2, backward_input=3, backward_weight=4)
    sim = simulate(build("1f1b", ranks=ranks, microbatches=microbatches, split_backward=False), costs)
    assert sim.longest_stage == sim.makespan == (microbatches + ranks - 1) * 9
    assert sim.bubble_ratio == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert sim.peak_activations == tuple(ranks - i + 1 for i in range(1, ranks + 1))


@pytest.mark.parametrize(("ranks", "microbatches", "longest"), [(4, 8, 33), (8, 24, 93)])
def test_longest_stage_of_1f1b(ranks, microbatches, longest):
    plan = build("1f1b", ranks=ranks, microbatches=microbatches, split_backward=False)
    assert simulate(plan, UNIT).longest_stage == longest


def test_measured_times():
    """Zero bubble's profile of its 8-rank model, with communication: 1F1B's bubble ratio is 0.243."""
    costs = Costs(forward=18.522, backward_input=18.086, backward_weight=9.337, comm=0.601)
    sim = simulate(build("1f1b", ranks=8, microbatches=24, split_backward=False), costs)
    assert round(sim.bubble_ratio, 3) == 0.243


@pytest.mark.parametrize(("split", "peak"), [(True, 12), (False, 12)])
def test_gpipe_holds_every_microbatch(split, peak):
    plan = build("gpipe", ranks=4, microbatches=12, split_backward=split)
    assert simulate(plan).peak_activations == (peak,) * 4


def test_delayed_weight_gradients_hold_every_microbatch():
    """2BP's price: no W before the cooldown, so that the peak is the number of micro-batches on every rank."""
    assert simulate(build("1f1b", ranks=4, microbatches=12)).peak_activations == (12,) * 4


def test_a_hand_worked_plan():
    """Two ranks, every number different, worked out with pencil and paper.

    rank 0: F0 0-1, F1 1-2, then 0B0 waits for 1B0 (ends 10) and its way (1): 11-18; 0B1 at 1B1's end 17 + 1 = 18-25.
    rank 1: F0 arrives at 1 + 1 = 2: 2-4; B0 4-10; F1 10-12; I1 12-17; W1 17-20.
    """
    plan = Plan.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n")
    costs = Costs(forward=(1, 2), backward_input=5, backward_weight=[9, 3], backward=(7, 6), comm=1)
    sim = simulate(plan, costs)
    assert [[tuple(map(float, entry[1:])) for entry in row] for row in sim.timeline] == [
        [(0, 1), (1, 2), (11, 18), (18, 25)],
        [(2, 4), (4, 10), (10, 12), (12, 17), (17, 20)],
    ]
    assert [[str(entry.action) for entry in row] for row in sim.timeline] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1I1", "1W1"],
    ]
    assert sim.makespan == 25
    assert sim.longest_stage == 25
    assert sim.rank_bubble == pytest.approx((1 - 16 / 25, 1 - 18 / 25))
    assert sim.bubble_ratio == pytest.approx(1 - 34 / 50)
    assert sim.peak_activations == (2, 1)


def test_longest_stage_is_not_the_makespan():
    """Rank 0 idles at the end and rank 1 at the start, so that neither spans the whole run."""
    sim = simulate(Plan.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n"), Costs(forward=4, backward_input=1, backward_weight=(0, 9)))
    assert sim.makespan == 18  # 0F0 0-4, 1F0 4-8, 1I0 8-9, 1W0 9-18, 0I0 9-10
    assert sim.longest_stage == 14  # rank 1: 4-18; rank 0: 0-10


def test_communication_takes_time_between_ranks_only():
    costs = Costs(comm=100)
    assert simulate(Plan.from_csv("0F0,1F0,1B0,0B0\n"), costs).makespan == 6
    assert simulate(Plan.from_csv("0F0,0B0\n1F0,1B0\n"), costs).makespan == 206


def test_communication_costs_belong_to_the_sending_stage():
    """0F0 0-1, 10 on the way, 1F0 11-12, 1B0 12-14, 20 on the way, 0B0 34-36."""
    assert simulate(Plan.from_csv("0F0,0B0\n1F0,1B0\n"), Costs(comm=(10, 20))).makespan == 36


def test_peak_is_in_whole_stages():
    """Four stages on two ranks: a stage is half of a rank's share of the model."""
    sim = simulate(Plan.from_csv("0F0,0F1,3F0,3I0,3W0,3F1,3B1,0B0,0B1\n1F0,2F0,2B0,1F1,2F1,2B1,1B0,1B1\n"))
    assert sim.peak_activations == (1.5, 1.5)  # rank 1: 1F0, 1F1 and 2F1
    assert simulate(Plan.from_csv("0F0,1F0,1B0,0B0\n")).peak_activations == (1,)


def test_the_backward_defaults_to_both_halves():
    plan = build("1f1b", ranks=4, microbatches=8, split_backward=False)
    stages = Costs(backward_input=(1, 2, 3, 4), backward_weight=2)
    assert simulate(plan, stages) == simulate(plan, Costs(backward=(3, 4, 5, 6)))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_every_timeline_is_possible(name, split):
    costs = Costs(forward=1.5, backward_input=0.75, backward_weight=1.25, comm=0.25)
    for ranks in (1, 2, 5):
        for microbatches in (1, 3, 8):
            plan = build(name, ranks=ranks, microbatches=microbatches, split_backward=split)
            sim = simulate(plan, costs)
            ends = {str(entry.action): entry.end for row in sim.timeline for entry in row}
            for row, actions in zip(sim.timeline, plan.ranks, strict=True):
                assert tuple(entry.action for entry in row) == actions
                assert all(before.end <= after.start for before, after in pairwise(row))
                for action, start, _ in row:
                    if action.kind == "F" and action.stage > 0:
                        assert start >= ends[f"{action.stage - 1}F{action.microbatch}"] + 0.25
                    if action.kind in ("I", "B") and action.stage < ranks - 1:
                        assert start >= ends[f"{action.stage + 1}{action.kind}{action.microbatch}"] + 0.25
            assert sim.makespan >= sim.longest_stage >= microbatches * 3.5
            assert math.fsum(sim.rank_bubble) / ranks == pytest.approx(sim.bubble_ratio)


def test_zero_costs():
    sim = simulate(build("1f1b", ranks=2), Costs(forward=0, backward_input=0, backward_weight=0))
    assert (sim.makespan, sim.bubble_ratio, sim.rank_bubble) == (0, 0, (0, 0))


def test_refuses_a_plan_that_cannot_run():
    with pytest.raises(PlanError, match="deadlocks"):
        simulate(Plan.from_csv("1F0,0F0,1B0,0B0\n"))


@pytest.mark.parametrize("field", ["forward", "backward_input", "backward_weight", "backward", "comm"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", [1, -1], [1, None], object()])
def test_refuses_what_is_no_time(field, value):
    with pytest.raises(InputError, match=rf"Costs\.{field} is .*finite and at least 0"):
        Costs(**{field: value})


def test_only_the_backward_may_be_none():
    with pytest.raises(InputError, match=r"Costs\.forward is None"):
        Costs(forward=None)


def test_refuses_costs_for_another_number_of_stages():
    with pytest.raises(InputError, match=r"Costs\.forward has 3 entries, but the plan has 4 stages"):
        simulate(build("1f1b", ranks=4), Costs(forward=(1, 2, 3)))


def test_costs_do_not_follow_the_callers_list():
    times = [1.0, 2.0]
    costs = Costs(forward=times)
    times[0] = 50.0
    assert costs.forward == (1.0, 2.0)


def test_large_plans():
    """64 ranks and 1024 micro-batches, in seconds: the closed form of the makespan holds there too."""
    sim = simulate(build("1f1b", ranks=64, microbatches=1024), UNIT)
    assert sim.makespan == 3 * 1024 + 63
