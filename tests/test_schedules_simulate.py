"""`simulate` against published numbers: arXiv 2405.18047 (2BP) and arXiv 2401.10241 (zero bubble)."""

import math
from itertools import pairwise

import pytest

from twobp_fx.errors import InputError, PlanError
from twobp_fx.schedules import SCHEDULES, Costs, Plan, build, simulate

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


class TestMessages:
    """Latency, and bytes over bandwidth."""

    PLAN = "0F0,0B0\n1F0,1B0\n"

    def test_size_over_bandwidth(self):
        """0F0 0-1, 10 + 60/20 on the way, 1F0 14-15, 1B0 15-17, the gradient of the same size back: 30-32."""
        costs = Costs(comm=10, comm_bytes=60, bandwidth=20)
        assert simulate(Plan.from_csv(self.PLAN), costs).makespan == 32
        assert simulate(Plan.from_csv(self.PLAN), Costs(comm=13)).makespan == 32

    def test_sizes_belong_to_the_boundary_after_a_stage(self):
        """Stage 0's output and the gradient that comes back for it; the last stage sends nothing on."""
        costs = Costs(comm_bytes=(60, 10**6), bandwidth=20)
        assert simulate(Plan.from_csv(self.PLAN), costs).makespan == 1 + 3 + 3 + 3 + 2

    def test_nothing_is_sent_within_a_rank(self):
        assert simulate(Plan.from_csv("0F0,1F0,1B0,0B0\n"), Costs(comm_bytes=100, bandwidth=1)).makespan == 6

    @pytest.mark.parametrize("bandwidth", [0, -1, None, "fast", math.nan])
    def test_bandwidth_is_positive(self, bandwidth):
        with pytest.raises(InputError, match=r"Costs\.bandwidth is .* greater than 0"):
            Costs(bandwidth=bandwidth)


class TestBatchedWeight:
    """Adjacent W of a stage that run as one."""

    def spans(self, text, **costs):
        row = simulate(Plan.from_csv(text), Costs(**costs)).timeline[0]
        return [(str(entry.action), entry.start, entry.end) for entry in row if entry.action.kind == "W"]

    def test_adjacent_w_share_the_time(self):
        """Three W in the time of two: 4 units, a third each; then the rank goes on."""
        text = "0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2\n"
        spans = self.spans(text, backward_weight=2, batched_weight=(1, 1.5, 2))
        assert spans == [("0W0", 6, pytest.approx(6 + 4 / 3)), ("0W1", pytest.approx(6 + 4 / 3), pytest.approx(6 + 8 / 3)),
                         ("0W2", pytest.approx(6 + 8 / 3), pytest.approx(10))]  # fmt: skip

    def test_longer_runs_are_cut(self):
        """Five W in batches of at most two: 1.5 + 1.5 + 1."""
        text = ",".join([*(f"0F{k}" for k in range(5)), *(f"0I{k}" for k in range(5)), *(f"0W{k}" for k in range(5))])
        assert simulate(Plan.from_csv(text), Costs(batched_weight=[1, 1.5])).makespan == 14

    def test_only_neighbours_of_one_stage(self):
        text = "0F0,1F0,0F1,1F1,1I0,1I1,0I0,0W0,0I1,1W0,0W1,1W1\n"
        assert simulate(Plan.from_csv(text), Costs(batched_weight=(1, 0.1))).makespan == 12

    def test_one_sequence_a_stage(self):
        plan = build("gpipe", ranks=2, microbatches=2)
        sim = simulate(plan, Costs(batched_weight=[(1, 2), (1, 1.5)]))
        assert [row[-1].end - row[-3].end for row in sim.timeline] == [2, 1.5]
        with pytest.raises(InputError, match="batched_weight is for 2 stages, but the plan has 3"):
            simulate(build("gpipe", ranks=3), Costs(batched_weight=[(1, 2), (1, 1.5)]))

    def test_2bps_concatenated_w(self):
        """2BP's other gain: all that is left at the end of GPipe, in one W per stage (arXiv 2405.18047)."""
        plan = build("gpipe", ranks=4)
        assert simulate(plan).makespan == 18
        assert simulate(plan, Costs(batched_weight=(1, 1.5, 2, 2.5))).makespan == 16.5

    @pytest.mark.parametrize("value", [(), 1, "12", (1, -1), (1, math.inf), [(1, 2), ()], [(1,), 2]])
    def test_refuses_what_is_no_factor(self, value):
        with pytest.raises(InputError, match=r"Costs\.batched_weight is "):
            Costs(batched_weight=value)


class TestMemory:
    def test_over_time(self):
        """100 bytes saved, 30 of them held for W; rank 0: F0 0-1, F1 1-2, I0 3-4, W0 4-5, B1 8-10."""
        plan = Plan.from_csv("0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
        sim = simulate(plan, Costs(saved=100, held_for_weight=30))
        assert sim.memory[0] == ((0, 100), (1, 200), (4, 130), (5, 100), (7, 0))
        assert sim.memory[1] == ((1, 100), (3, 30), (3, 130), (5, 60), (6, 30), (7, 0))
        assert sim.peak_memory == (200, 130)
        assert sim.peak_activations == (2, 2)

    def test_counts_whole_stages_by_default(self):
        sim = simulate(build("zb-v", ranks=3, microbatches=6))
        assert sim.peak_memory == sim.peak_activations == (3, 3, 3)
        assert max(level for _, level in sim.memory[1]) == 3
        assert [row[-1][1] for row in sim.memory] == [0, 0, 0]

    def test_all_is_held_for_w_by_default(self):
        plan = build("zb-h1", ranks=3, microbatches=6)
        assert simulate(plan, Costs(saved=(5, 6, 7))).peak_memory == (15, 18, 21)

    def test_refuses_half_of_the_sizes(self):
        with pytest.raises(InputError, match="give what F saves, too"):
            Costs(held_for_weight=3)
        with pytest.raises(InputError, match=r"Costs\.saved is -1; sizes must be"):
            Costs(saved=-1)


class TestCriticalPath:
    def path(self, plan, costs=None):
        return " ".join(str(entry.action) for entry in simulate(plan, costs).critical_path)

    def test_through_the_other_rank(self):
        plan = Plan.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n")
        costs = Costs(forward=(1, 2), backward_input=5, backward_weight=[9, 3], backward=(7, 6), comm=1)
        assert self.path(plan, costs) == "0F0 1F0 1B0 0B0 0B1"  # the hand-worked plan above; 0B1's gradient came at 18, too

    def test_of_the_naive_schedule(self):
        assert self.path(build("naive", ranks=3)) == "0F0 1F0 2F0 2I0 1I0 0I0 0W0"

    def test_has_no_slack(self):
        """Its actions and the communication between them add up to the makespan."""
        costs = Costs(forward=1.25, backward_input=0.75, backward_weight=0.5, comm=0.125)
        for name in SCHEDULES:
            plan = build(name, ranks=4)
            sim = simulate(plan, costs)
            path = sim.critical_path
            assert path[0].start == 0
            assert path[-1].end == sim.makespan
            for before, after in pairwise(path):
                same = plan.rank_of_stage(before.action.stage) == plan.rank_of_stage(after.action.stage)
                assert after.start - before.end == (0 if same else 0.125)


class TestStepTime:
    def test_with_a_barrier_is_the_makespan(self):
        sim = simulate(build("zb-h2", ranks=4, microbatches=8))
        assert sim.step_time == sim.makespan == 27

    def test_without_steps_overlap(self):
        """Two steps of rank 0 and rank 1: 4 + 1 + 9 units of rank 1 each, after its first start; rank 0 waits for none."""
        plan = Plan.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
        costs = Costs(forward=4, backward_input=1, backward_weight=(0, 9))
        sim = simulate(plan, costs, barrier=False)
        assert (sim.makespan, sim.longest_stage, sim.step_time) == (18, 14, 14)
