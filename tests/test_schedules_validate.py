"""What `validate` accepts, and the message for each fault it finds."""

import random

import pytest

from twobp_fx.errors import PlanError
from twobp_fx.schedules import Plan, build, validate


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
    "rank without actions": (["0F0 0B0", "", "1F0 1B0"], "rank 1 has no action"),
    "stage on two ranks": (["0F0 1F0 0B0", "1B0"], "stage 1 is on two ranks: 1F0 is on rank 0, 1B0 on rank 1"),
    "gap in the stages": (["0F0 0B0", "2F0 2B0"], "there is a stage 2 but no stage 1"),
    "first stage missing": (["1F0 1B0"], "there is a stage 1 but no stage 0"),
    "F twice": (["0F0 0F0 0B0"], "rank 0 runs 0F0 twice, at positions 0 and 1"),
    "W twice": (["0F0 0I0 0W0 0W0"], "rank 0 runs 0W0 twice, at positions 2 and 3"),
    "F missing": (["0F0 0B0 0B1"], "rank 0: 0F1 is missing; every stage runs one F for each of 2 micro-batches"),
    "micro-batch missing on one stage": (["0F0 0F1 0B0 0B1", "1F0 1B0"], "rank 1: 1F1 is missing"),
    "micro-batch number skipped": (["0F0 0B0 0F2 0B2"], "rank 0: 0F1 is missing"),
    "B beside I": (["0F0 0B0 0I0 0W0"], "rank 0: 0B0 and 0I0 exclude each other"),
    "B beside W": (["0F0 0B0 0W0"], "rank 0: 0B0 and 0W0 exclude each other"),
    "no backward": (["0F0 0B0", "1F0"], "rank 1: 1F0 has no backward; add 1B0, or 1I0 and 1W0"),
    "W without I": (["0F0 0W0"], "rank 0: 0W0 has no 0I0; add it before 0W0"),
    "I without W": (["0F0 0I0"], "rank 0: 0I0 has no 0W0; add it after 0I0"),
    "B before F": (["0B0 0F0"], "rank 0: 0B0 at position 0 comes before 0F0 at position 1"),
    "I before F": (["0I0 0F0 0W0"], "rank 0: 0I0 at position 0 comes before 0F0 at position 1"),
    "W before I": (["0F0 0W0 0I0"], "rank 0: 0W0 at position 1 comes before 0I0 at position 2"),
    "deadlock on one rank, forward": (
        ["1F0 0F0 1B0 0B0"],
        r"deadlocks: 1F0 on rank 0 waits for 0F0 later on the same rank\.",
    ),
    "deadlock on one rank, backward": (
        ["0F0 1F0 0B0 1I0 1W0"],
        r"deadlocks: 0B0 on rank 0 waits for 1I0 later on the same rank\.",
    ),
    "deadlock of two ranks": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        r"deadlocks: 0B0 on rank 0 waits for 1B0 on rank 1; 1F1 on rank 1 waits for 0F1 on rank 0\.",
    ),
    "deadlock of two ranks, seen from a third": (
        ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1", "2F0 2F1 2I0 2I1 2W0 2W1"],
        r"deadlocks: 1I0 on rank 1 waits for 2I0 on rank 2; 2F1 on rank 2 waits for 1F1 on rank 1\.",
    ),
}


@pytest.mark.parametrize(("ranks", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_refuses(ranks, message):
    with pytest.raises(PlanError, match=message) as caught:
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
