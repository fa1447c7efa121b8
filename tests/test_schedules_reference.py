"""Published numbers of the zero-bubble family: arXiv 2401.10241 (ZB-H1, ZB-H2, ZB-V) and 2405.15362 (V-Half, V-Min).

Unit times unless said otherwise, no communication; a stage of a plan with v stages a rank takes 1/v of the time. The 2BP
table is in test_schedules_simulate.py. p ranks, m micro-batches.
"""

import time
from itertools import pairwise

import pytest

from twobp_fx.schedules import Costs, Plan, Simulation, build, simulate

SIZES = [(4, 8), (8, 24)]

LONGEST = {  # the longest stage: the largest of a rank's last end minus its first start
    ("1f1b", 1): (33, 93),
    ("zb-h1", 1): (27, 79),
    ("zb-h2", 1): (24, 72),
    ("interleaved-1f1b", 2): (28.5, 82.5),
    ("interleaved-1f1b", 4): (26.25, 77.25),
    ("zb-v", 2): (24, 72),
    ("v-half", 2): (26.5, 80.5),
    ("v-min", 2): (29.5, 85.5),
}


def published(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """The plan as the papers have it: 1F1B and interleaved 1F1B unsplit, the others split."""
    split = not name.endswith("1f1b")
    return build(name, ranks=ranks, microbatches=microbatches, chunks=chunks, split_backward=split)


def at_times(plan: Plan, f: float = 1, i: float = 1, w: float = 1, **more: float) -> Simulation:
    chunks = plan.stages // len(plan.ranks)
    return simulate(plan, Costs(f / chunks, i / chunks, w / chunks, **more), barrier=False)


@pytest.mark.parametrize("size", [0, 1], ids=["p4-m8", "p8-m24"])
@pytest.mark.parametrize(("name", "chunks"), LONGEST)
def test_longest_stage(name, chunks, size):
    assert at_times(published(name, *SIZES[size], chunks)).longest_stage == LONGEST[name, chunks][size]


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (6, 12), (16, 64)])
@pytest.mark.parametrize("times", [(1, 1, 1), (5, 4, 3), (10, 9, 8)])
def test_bubble_times(ranks, microbatches, times):
    """The bubble of the longest stage beside its m (T_F + T_I + T_W) of work; ZB-H1's and ZB-H2's formulas hold for T_W
    no larger than T_I and T_F, because more W than there is gap would not vanish in it."""
    f, i, w = times
    bubbles = {
        ("gpipe", 1): (ranks - 1) * (f + i + w),
        ("1f1b", 1): (ranks - 1) * (f + i + w),
        ("interleaved-1f1b", 2): (ranks - 1) * (f + i + w) / 2,
        ("zb-h1", 1): (ranks - 1) * (f + i - w),
        ("zb-h2", 1): (ranks - 1) * (f + i - 2 * w),
    }
    for (name, chunks), bubble in bubbles.items():
        if microbatches % ranks and chunks > 1:
            continue
        split = name.startswith("zb")
        plan = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks, split_backward=split)
        assert at_times(plan, f, i, w).longest_stage - microbatches * (f + i + w) == pytest.approx(bubble), name


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), *SIZES, (6, 18), (16, 64)])
def test_zb_v_has_no_bubble(ranks, microbatches):
    assert at_times(published("zb-v", ranks, microbatches, 2)).longest_stage == 3 * microbatches


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (8, 64)])
def test_bubbles_of_controllable_memory(ranks, microbatches):
    """About half, and about two thirds, of 1F1B's bubble: within one micro-batch's time (3 units) of that."""
    bubble = 3 * (ranks - 1)
    for name, share in (("v-half", 1 / 2), ("v-min", 2 / 3)):
        found = at_times(published(name, ranks, microbatches, 2)).longest_stage - 3 * microbatches
        assert found <= share * bubble + 3, name


@pytest.mark.parametrize(("name", "peaks"), [("zb-v", (4, 8)), ("v-half", (3, 5)), ("v-min", (2, 4))])
def test_peaks_in_a_v(name, peaks):
    for (ranks, microbatches), peak in zip(SIZES, peaks, strict=True):
        assert max(at_times(published(name, ranks, microbatches, 2)).peak_activations) == peak


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_peaks(ranks, microbatches):
    """In whole stages' micro-batches, rank by rank; i counts ranks from 1."""
    numbers = range(1, ranks + 1)

    def peaks(name, chunks=1):
        return at_times(published(name, ranks, microbatches, chunks)).peak_activations

    assert simulate(build("gpipe", ranks=ranks, microbatches=microbatches)).peak_activations == (microbatches,) * ranks
    assert peaks("1f1b") == tuple(ranks - i + 1 for i in numbers)
    assert peaks("zb-h1") == (ranks,) * ranks  # (p-i+1) M_B + (i-1) M_W with M_B = M_W = 1
    assert peaks("zb-h2") == (2 * ranks - 1,) * ranks
    for chunks in (2, 4):
        assert peaks("interleaved-1f1b", chunks)[0] == ranks * (1 + (ranks - 1) / (ranks * chunks))
    assert max(peaks("dualpipe-v", 2)) == ranks + 0.5  # DeepSeek's PP + 1 stages, of which a rank holds two, PP = 2p


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("held", [0, 30, 100])
def test_peaks_when_i_frees_a_part(ranks, microbatches, held):
    """M_B = 100 bytes from F to I, M_W from I to W."""
    sizes = Costs(saved=100, held_for_weight=held)
    h1 = simulate(published("zb-h1", ranks, microbatches), sizes).peak_memory
    h2 = simulate(published("zb-h2", ranks, microbatches), sizes).peak_memory
    for i in range(1, ranks + 1):
        assert h1[i - 1] == (ranks - i + 1) * 100 + (i - 1) * held
        assert h2[i - 1] == (2 * ranks - 2 * i + 1) * 100 + (2 * i - 2) * held


@pytest.mark.parametrize(("name", "ratio"), [("1f1b", 0.243), ("zb-h1", 0.159), ("zb-h2", 0.108)])
def test_measured_times(name, ratio):
    """arXiv 2401.10241's profile of its 8-rank model. In that paper as here, the ratio is of the longest stage, which
    at these times is also the makespan."""
    sim = at_times(published(name, 8, 24), 18.522, 18.086, 9.337, comm=0.601)
    assert sim.bubble_ratio == pytest.approx(ratio, abs=0.0005)
    assert sim.longest_stage == pytest.approx(sim.makespan)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_optimizer_barrier(ranks, microbatches):
    """ZB-H2 and ZB-V do without a bubble because a rank that ends late also begins late. A barrier at the end of the step
    takes that away: ZB-H2 then takes as long as ZB-H1, and ZB-V pays (p-1)/2 more. Without a barrier, the next step
    follows after the longest stage's time."""
    h1, h2 = (at_times(published(name, ranks, microbatches)) for name in ("zb-h1", "zb-h2"))
    assert h2.makespan == h1.makespan == {4: 27, 8: 79}[ranks]
    zb_v = at_times(published("zb-v", ranks, microbatches, 2))
    assert zb_v.makespan == zb_v.longest_stage + (ranks - 1) / 2
    for sim in (h1, h2, zb_v):
        assert sim.step_time == sim.longest_stage
    for name in ("zb-h2", "zb-v"):
        with_barrier = simulate(build(name, ranks=ranks, microbatches=microbatches))
        assert with_barrier.step_time == with_barrier.makespan > with_barrier.longest_stage


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), *SIZES])
def test_dualpipe_v_bubble(ranks, microbatches):
    """DeepSeek's table says (PP/2 - 1) (F&B + B - 3W) with PP = 2p, in times of a stage: 2 (p - 1) at unit times, if F&B
    takes 3. That is for pairs whose F hands over its output when the pair ends (test_schedules_torch.py has it so). A
    plan runs F, then B, and the output of F leaves at once: half of that bubble is left."""
    sim = simulate(build("dualpipe-v", ranks=ranks, microbatches=microbatches))
    assert sim.longest_stage - 6 * microbatches == (2 * (ranks - 1)) / 2


def messages(plan: Plan) -> int:
    """Point-to-point messages of the forward."""
    homes = [plan.rank_of_stage(stage) for stage in range(plan.stages)]
    return plan.microbatches * sum(a != b for a, b in pairwise(homes))


def test_a_v_sends_twice_as_much():
    assert messages(build("zb-v", ranks=8, microbatches=24)) == 2 * messages(build("1f1b", ranks=8, microbatches=24))


@pytest.mark.parametrize("name", ["zb-h2", "zb-v", "v-half"])
def test_large_plans_simulate_in_seconds(name):
    """64 ranks and 1024 micro-batches in under 5 seconds of this process, whatever else the machine does."""
    plan = build(name, ranks=64, microbatches=1024)
    start = time.process_time()
    sim = simulate(plan)
    assert time.process_time() - start < 5
    assert sim.makespan >= 3 * 1024 * plan.stages / 64
