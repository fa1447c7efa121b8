"""The interleaved and zero-bubble plans: their published orders, what they can take, and where they place stages."""

import pytest

from twobp_fx.errors import PlanError
from twobp_fx.schedules import SCHEDULES, ActionKind, Plan, build, looped, one_chunk, simulate, v_shape, validate

ONE_CHUNK = ["naive", "gpipe", "1f1b", "1f1b-1", "1f1b-2", "zb-h1", "zb-h2"]
IN_A_V = ["zb-v", "v-half", "v-min", "dualpipe-v"]
ALWAYS_SPLIT = ["zb-h1", "zb-h2", *IN_A_V]


def rows(plan: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in plan.ranks]


def letters(plan: Plan, rank: int) -> str:
    """The kinds of a rank's actions, lower case for its second stage."""
    upper = min(action.stage for action in plan.ranks[rank])
    return "".join(action.kind if action.stage == upper else action.kind.lower() for action in plan.ranks[rank])


class TestOrders:
    """Worked out from the papers' rules and figures."""

    def test_interleaved(self):
        """arXiv 2104.04473: (v-1) p + 2 (p-1-r) warm-up forwards, micro-batches in groups of p."""
        plan = build("interleaved-1f1b", ranks=2, microbatches=4, split_backward=False)
        assert rows(plan) == [
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
        ]

    def test_interleaved_split(self):
        assert rows(build("interleaved-1f1b", ranks=2, microbatches=2)) == [
            "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
            "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
        ]

    def test_zb_h1(self):
        """arXiv 2401.10241, figure 2: rank i delays W by i - 1."""
        assert rows(build("zb-h1", ranks=3, microbatches=4)) == [
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
        ]

    def test_zb_h2(self):
        """arXiv 2401.10241, figure 3: 2 (p - r) - 1 forwards before the first I, and no gap on any rank."""
        plan = build("zb-h2", ranks=4, microbatches=8)
        for rank, row in enumerate(plan.ranks):
            kinds = "".join(action.kind for action in row)
            assert kinds.index("I") == 2 * (4 - rank) - 1
            assert kinds.endswith("I" + "W" * (2 * rank + 1))

    @pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 7), (8, 24)])
    def test_zb_v(self, ranks, microbatches):
        """arXiv 2401.10241, section 6, rank 0 and the last rank written out."""
        plan = build("zb-v", ranks=ranks, microbatches=microbatches)
        steady = microbatches - 2 * ranks + 1
        ends = "IWfiw" * (ranks - 1)
        assert letters(plan, 0) == "F" * (2 * ranks - 1) + "fiw" * ranks + "FIWfiw" * steady + ends + "IW" * ranks
        assert letters(plan, ranks - 1).startswith("F" + "fF" * (ranks - 1) + "fiw" + "FIWfiw" * steady)

    def test_dualpipe_v(self):
        """The eight steps of github.com/deepseek-ai/DualPipe, ranks 0 and 1 of 2 with four micro-batches."""
        assert rows(build("dualpipe-v", ranks=2, microbatches=4)) == [
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
            "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
        ]


class TestEveryPlan:
    @pytest.mark.parametrize("name", [name for name in ALWAYS_SPLIT if name != "dualpipe-v"])
    def test_is_valid_for_any_number(self, name):
        for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16):
            for microbatches in (1, 2, 3, 4, 5, 7, 8, 13, 16, 27, 40):
                self.check(build(name, ranks=ranks, microbatches=microbatches), name, ranks, microbatches)

    def test_of_dualpipe_v_is_valid(self):
        for ranks in (1, 2, 3, 4, 5, 8, 13):
            for more in (0, 1, 2, 9):
                plan = build("dualpipe-v", ranks=ranks, microbatches=2 * ranks + more)
                self.check(plan, "dualpipe-v", ranks, 2 * ranks + more)

    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize("chunks", [2, 3, 5])
    def test_of_interleaved_is_valid(self, chunks, split):
        for ranks in (1, 2, 3, 4, 7):
            for groups in (1, 2, 5):
                plan = build("interleaved-1f1b", ranks=ranks, microbatches=groups * ranks, chunks=chunks, split_backward=split)
                self.check(plan, "interleaved-1f1b", ranks, groups * ranks, chunks)
                assert plan.split is split

    def check(self, plan, name, ranks, microbatches, chunks=None):
        validate(plan)
        assert (plan.name, len(plan.ranks), plan.microbatches) == (name, ranks, microbatches)
        placement = looped(ranks, chunks) if chunks else v_shape(ranks) if name in IN_A_V else one_chunk(ranks)
        assert tuple(map(plan.rank_of_stage, range(plan.stages))) == placement.rank_of_stage
        if name in ALWAYS_SPLIT and name != "dualpipe-v":
            assert all(action.kind is not ActionKind.B for row in plan.ranks for action in row)

    @pytest.mark.parametrize("name", list(SCHEDULES))
    def test_has_default_numbers_that_it_can_take(self, name):
        for ranks in (1, 2, 3, 8):
            plan = build(name, ranks=ranks)
            validate(plan)
            if name not in ("naive", "gpipe", "1f1b", "1f1b-1"):
                assert plan.microbatches == 2 * ranks

    @pytest.mark.parametrize(("name", "peak"), [("v-half", lambda p: p // 2 + 1), ("v-min", lambda p: (p + 4) // 3)])
    def test_with_controllable_memory_keeps_it(self, name, peak):
        """About p/2 and p/3 for every number of ranks, never more than is asked for, and never longer than 1F1B."""
        for ranks in range(2, 18):
            plan = build(name, ranks=ranks, microbatches=3 * ranks)
            sim = simulate(plan)
            assert max(sim.peak_activations) == peak(ranks)
            assert sim.makespan / 2 < 3 * (4 * ranks - 1)


class TestPlacement:
    def test_one_chunk(self):
        assert one_chunk(3).rank_of_stage == (0, 1, 2)
        assert one_chunk(3).stages_of_rank(1) == (1,)

    def test_looped(self):
        placement = looped(4, 2)
        assert placement.rank_of_stage == (0, 1, 2, 3, 0, 1, 2, 3)
        assert placement.stages_of_rank(1) == (1, 5)
        assert (placement.ranks, placement.stages) == (4, 8)

    def test_v(self):
        placement = v_shape(4)
        assert placement.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)
        assert placement.stages_of_rank(0) == (0, 7)
        assert placement.stages_of_rank(3) == (3, 4)


class TestRefused:
    @pytest.mark.parametrize("name", ALWAYS_SPLIT)
    def test_unsplit_zero_bubble(self, name):
        with pytest.raises(PlanError, match=f"'{name}' is always split; leave out split_backward=False"):
            build(name, ranks=4, split_backward=False)

    def test_interleaved_takes_whole_groups(self):
        with pytest.raises(PlanError, match="runs a multiple of 4 micro-batches, not 6; use 4 or 8"):
            build("interleaved-1f1b", ranks=4, microbatches=6)
        with pytest.raises(PlanError, match="not 3; use 4"):
            build("interleaved-1f1b", ranks=4, microbatches=3)

    def test_dualpipe_v_needs_twice_the_ranks(self):
        with pytest.raises(PlanError, match="runs at least 8 micro-batches, not 7; use more, or 'zb-v'"):
            build("dualpipe-v", ranks=4, microbatches=7)

    @pytest.mark.parametrize("name", IN_A_V)
    @pytest.mark.parametrize("chunks", [1, 3])
    def test_a_v_has_two_stages_a_rank(self, name, chunks):
        with pytest.raises(PlanError, match=f"holds 2 stages a rank, not {chunks}; leave out chunks"):
            build(name, ranks=4, chunks=chunks)
        assert build(name, ranks=4, chunks=2) == build(name, ranks=4)

    @pytest.mark.parametrize("name", ONE_CHUNK)
    def test_one_stage_a_rank(self, name):
        with pytest.raises(PlanError, match="holds one stage a rank, not 2"):
            build(name, ranks=4, chunks=2)

    def test_interleaved_has_chunks(self):
        with pytest.raises(PlanError, match="2 or more stages a rank, not 1; for one, use '1f1b'"):
            build("interleaved-1f1b", ranks=4, chunks=1)
        with pytest.raises(PlanError, match=r"chunks is 2\.5"):
            build("interleaved-1f1b", ranks=4, chunks=2.5)

    def test_huge_plans(self):
        with pytest.raises(PlanError, match="use fewer"):
            build("interleaved-1f1b", ranks=10, microbatches=1000, chunks=1000)
