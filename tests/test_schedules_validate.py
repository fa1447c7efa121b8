"""What `validate` accepts, and the message for each fault it finds."""

import random
import re

import pytest

from twobp_fx.errors import InputError, PlanError
from twobp_fx.schedules import Costs, Plan, build, simulate, validate


def plan(*ranks: str) -> Plan:
    return Plan.from_csv("\n".join(row.replace(" ", ",") for row in ranks), name="p")


@pytest.mark.parametrize(
    "ranks",
    [
        ["0F0 0B0"],
        ["0F0 1F0 2F0 2B0 1B0 0B0"],  # one rank that runs all stages
        ["0F0 1F0 1I0 0I0 1W0 0W0"],
        ["0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1I0 1B1 1W0"],  # B here, I and W there
        ["0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2B0 1B0"],  # a V: two stages a rank
        ["0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"],  # micro-batches in another order
        ["1F0 1B0", "0F0 0B0"],  # stages on the ranks the other way round
    ],
)
def test_accepts(ranks):
    validate(plan(*ranks))


FAULTS = {
    "rank without actions": (["0F0 0B0", "", "1F0 1B0"], "rank 1 (line 2) has no action"),
    "stage on two ranks": (["0F0 1F0 0B0", "1B0"], "stage 1 is on two ranks: 1F0 is on rank 0 (line 1), 1B0 on rank 1 (line 2)"),
    "gap in the stages": (["0F0 0B0", "2F0 2B0"], "there is a stage 2 but no stage 1"),
    "first stage missing": (["1F0 1B0"], "there is a stage 1 but no stage 0"),
    "F twice": (["0F0 0F0 0B0"], "rank 0 (line 1) runs 0F0 twice, at positions 0 and 1"),
    "W twice": (["0F0 0I0 0W0 0W0"], "rank 0 (line 1) runs 0W0 twice, at positions 2 and 3"),
    "F missing": (["0F0 0B0 0B1"], "rank 0 (line 1): 0F1 is missing; every stage runs one F for each of 2 micro-batches"),
    "micro-batch missing on one stage": (["0F0 0F1 0B0 0B1", "1F0 1B0"], "rank 1 (line 2): 1F1 is missing"),
    "micro-batch number skipped": (["0F0 0B0 0F2 0B2"], "rank 0 (line 1): 0F1 is missing"),
    "B beside I": (["0F0 0B0 0I0 0W0"], "rank 0 (line 1): 0B0 and 0I0 exclude each other"),
    "B beside W": (["0F0 0B0 0W0"], "rank 0 (line 1): 0B0 and 0W0 exclude each other"),
    "no backward": (["0F0 0B0", "1F0"], "rank 1 (line 2): 1F0 has no backward; add 1B0, or 1I0 and 1W0"),
    "W without I": (["0F0 0W0"], "rank 0 (line 1): 0W0 has no 0I0; add it before 0W0"),
    "I without W": (["0F0 0I0"], "rank 0 (line 1): 0I0 has no 0W0; add it after 0I0"),
    "B before F": (["0B0 0F0"], "rank 0 (line 1): 0B0 at position 0 comes before 0F0 at position 1"),
    "I before F": (["0I0 0F0 0W0"], "rank 0 (line 1): 0I0 at position 0 comes before 0F0 at position 1"),
    "W before I": (["0F0 0W0 0I0"], "rank 0 (line 1): 0W0 at position 1 comes before 0I0 at position 2"),
    "deadlock on one rank, forward": (
        ["1F0 0F0 1B0 0B0"],
        "deadlocks: 1F0 on rank 0 (line 1) waits for 0F0 later on the same rank.",
    ),
    "deadlock on one rank, backward": (
        ["0F0 1F0 0B0 1I0 1W0"],
        "deadlocks: 0B0 on rank 0 (line 1) waits for 1I0 later on the same rank.",
    ),
    "deadlock of two ranks": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        "deadlocks: 0B0 on rank 0 (line 1) waits for 1B0 on rank 1 (line 2); "
        "1F1 on rank 1 (line 2) waits for 0F1 on rank 0 (line 1).",
    ),
    "deadlock of two ranks, seen from a third": (
        ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1", "2F0 2F1 2I0 2I1 2W0 2W1"],
        "deadlocks: 1I0 on rank 1 (line 2) waits for 2I0 on rank 2 (line 3); "
        "2F1 on rank 2 (line 3) waits for 1F1 on rank 1 (line 2).",
    ),
}


@pytest.mark.parametrize(("ranks", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_refuses(ranks, message):
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        validate(plan(*ranks))
    assert "plan 'p'" in str(caught.value)


def test_a_hostile_number_costs_nothing():
    """The work is bounded by the number of actions, not by the numbers in them."""
    with pytest.raises(PlanError, match="no stage 1"):
        validate(plan("0F0 0B0 999999F0 999999B0"))
    with pytest.raises(PlanError, match="0F1 is missing"):
        validate(plan("0F0 0B0 0F999999 0B999999"))


def test_random_faults_are_found():
    """Dropping, doubling or moving to another rank any action of a valid plan makes it invalid."""
    draw = random.Random(0)
    good = build("1f1b", ranks=4, microbatches=6)
    for _ in range(200):
        rows = [list(row) for row in good.ranks]
        rank, other = draw.sample(range(4), 2)
        action = draw.choice(rows[rank])
        change = draw.choice(["drop", "double", "move"])
        if change == "double":
            rows[rank].insert(draw.randrange(len(rows[rank])), action)
        else:
            rows[rank].remove(action)
            if change == "move":
                rows[other].insert(draw.randrange(len(rows[other])), action)
        with pytest.raises(PlanError):
            validate(Plan("p", tuple(map(tuple, rows))))


class TestMemoryCap:
    def test_names_the_two_actions(self):
        message = (
            "plan 'p', rank 0 (line 1): with 0F2 at position 2 it holds 3, more than its memory cap of 2; the next to free "
            "any is 0W0 at position 4: run that first, or raise the cap"
        )
        rows = ["0F0 0F1 0F2 0I0 0W0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
        with pytest.raises(PlanError, match=re.escape(message)):
            validate(plan(*rows), memory_cap=2)
        validate(plan(*rows), memory_cap=3)

    @pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"])
    def test_is_the_simulated_peak(self, name):
        good = build(name, ranks=4, microbatches=8)
        peaks = simulate(good).peak_activations
        validate(good, memory_cap=max(peaks))
        validate(good, memory_cap=peaks)
        for rank in range(4):
            with pytest.raises(PlanError, match=rf"rank {rank} \(line {rank + 1}\): with .* it holds .* memory cap"):
                validate(good, memory_cap=[peak - 0.25 * (r == rank) for r, peak in enumerate(peaks)])

    def test_in_bytes(self):
        """Rank 1 of ZB-H1 on 2 ranks: one micro-batch before I, and one between I and W."""
        costs = Costs(saved=(100, 200), held_for_weight=(0, 50))
        good = build("zb-h1", ranks=2, microbatches=4)
        validate(good, memory_cap=(200, 250), costs=costs)
        with pytest.raises(PlanError, match=r"rank 1 \(line 2\): with 1F1 at position 2 it holds 250, .* free any is 1I1"):
            validate(good, memory_cap=(200, 249), costs=costs)

    def test_what_i_stashes_can_be_too_much(self):
        with pytest.raises(PlanError, match=r"with 0I0 at position 1 it holds 30, .* free any is 0W0 at position 2"):
            validate(plan("0F0 0I0 0W0"), memory_cap=20, costs=Costs(saved=10, held_for_weight=30))

    @pytest.mark.parametrize("cap", [0, -1, "4", [1, None], float("nan")])
    def test_must_be_a_number(self, cap):
        with pytest.raises(InputError, match=r"memory_cap is .* greater than 0, or one a rank"):
            validate(build("1f1b", ranks=2), memory_cap=cap)

    def test_must_be_one_a_rank(self):
        with pytest.raises(InputError, match="memory_cap has 3 entries, but the plan has 2 ranks"):
            validate(build("1f1b", ranks=2), memory_cap=(1, 2, 3))
