"""Our plans in torch's pipeline engine, and torch's plans in ours. Nothing is run: orders and text only."""

import random
import re

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from twobp_fx.errors import PlanError
from twobp_fx.schedules import SCHEDULES, Costs, Plan, build, load, simulate, validate

FORMS = [(name, split) for name, schedule in SCHEDULES.items() for split in (True, False) if split or not schedule.always_split]


def bare(cls: type, ranks: int, stages: int, microbatches: int):
    """A torch schedule without stages, process group or loss: enough to load, order and dump plans."""
    schedule = cls.__new__(cls)
    schedule.pp_group_size = ranks
    schedule._num_stages = schedule.num_stages = stages
    schedule._n_microbatches = microbatches
    schedule._stages = []
    schedule._defer_pp_recv = False
    schedule.pipeline_order = {}
    return schedule


@pytest.mark.parametrize(("name", "split"), FORMS)
def test_torch_loads_our_csv(name, split, tmp_path):
    plan = build(name, ranks=4, split_backward=split)
    path = tmp_path / "plan.csv"
    path.write_bytes(plan.to_csv().encode())

    runtime = bare(torch_schedules._PipelineScheduleRuntime, 4, plan.stages, plan.microbatches)
    runtime._load_csv(str(path), format="compute_only")  # validates the order and adds the communication

    computed = [[str(action) for action in runtime.pipeline_order_with_comms[rank] if action.is_compute_op] for rank in range(4)]
    assert computed == [[str(action) for action in row] for row in plan.ranks]
    assert runtime.stage_index_to_group_rank == {stage: plan.rank_of_stage(stage) for stage in range(plan.stages)}

    runtime._dump_csv(str(tmp_path / "torch.csv"), format="compute_only")
    assert (tmp_path / "torch.csv").read_bytes() == path.read_bytes()
    assert load(tmp_path / "torch.csv", name=name) == plan


def test_action_text_is_torchs():
    for action in build("1f1b", ranks=3, microbatches=4).ranks[1]:
        theirs = torch_schedules._Action.from_str(str(action))
        assert str(theirs) == str(action)
        assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
            action.stage,
            action.kind.value,
            action.microbatch,
        )


def test_deadlocks_are_torchs():
    """Plans with actions swapped at random: ours to refuse exactly where torch cannot place sends and receives."""
    draw = random.Random(0)
    deadlocks = 0
    for trial in range(300):
        plan = build("1f1b", ranks=3, microbatches=4, split_backward=trial % 2 == 0)
        rows = [list(row) for row in plan.ranks]
        for _ in range(trial % 12):
            row = draw.choice(rows)
            at = draw.randrange(len(row) - 1)
            if row[at].microbatch != row[at + 1].microbatch:  # F, I, W of one micro-batch stay in order
                row[at], row[at + 1] = row[at + 1], row[at]
        swapped = Plan("swapped", tuple(map(tuple, rows)))
        theirs = {rank: [torch_schedules._Action.from_str(str(a)) for a in row] for rank, row in enumerate(rows)}
        try:
            torch_schedules._add_send_recv(theirs, stage_to_rank=lambda stage: stage, num_stages=3)
        except AssertionError:
            deadlocks += 1
            with pytest.raises(PlanError, match="deadlocks"):
                validate(swapped)
        else:
            validate(swapped)
    assert 30 < deadlocks < 270


def torch_zb_v(ranks: int, microbatches: int):
    schedule = bare(torch_schedules.ScheduleZBVZeroBubble, ranks, 2 * ranks, microbatches)
    schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return schedule


def torch_interleaved(ranks: int, microbatches: int, chunks: int, cls: type = torch_schedules.ScheduleInterleaved1F1B):
    schedule = bare(cls, ranks, chunks * ranks, microbatches)
    schedule.n_local_stages = chunks
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return schedule


def torch_dualpipe_v(ranks: int, microbatches: int):
    schedule = bare(torch_schedules.ScheduleDualPipeV, ranks, 2 * ranks, microbatches)
    schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return schedule


def dumped(schedule, tmp_path) -> Plan:
    path = tmp_path / "torch.csv"
    schedule._dump_csv(str(path), format="compute_only")
    return load(path)


@pytest.mark.parametrize(("ranks", "microbatches", "longest", "peak"), [(4, 8, 24, 4), (8, 24, 72, 8)])
def test_torchs_zb_v(ranks, microbatches, longest, peak, tmp_path):
    """A V of two half stages a rank, bubbles as empty cells: the makespan and peak of arXiv 2401.10241."""
    plan = dumped(torch_zb_v(ranks, microbatches), tmp_path)
    validate(plan)
    sim = simulate(plan, Costs(forward=0.5, backward_input=0.5, backward_weight=0.5))
    assert sim.longest_stage == longest
    assert max(sim.peak_activations) == peak
    assert plan.rank_of_stage(2 * ranks - 1) == plan.rank_of_stage(0) == 0


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "longest"),
    [(4, 8, 2, 28.5), (4, 8, 4, 26.25), (8, 24, 2, 82.5), (8, 24, 4, 77.25)],
)
def test_torchs_interleaved_1f1b(ranks, microbatches, chunks, longest, tmp_path):
    """Bubble (p-1)(T_F+T_I+T_W)/v; the first rank holds 1+(p-1)/(p v) of what 1F1B's holds."""
    plan = dumped(torch_interleaved(ranks, microbatches, chunks), tmp_path)
    validate(plan)
    sim = simulate(plan, Costs(forward=1 / chunks, backward_input=1 / chunks, backward_weight=1 / chunks))
    assert sim.longest_stage == longest
    assert sim.peak_activations[0] == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * chunks)))


SIZES = [(1, 2), (2, 4), (3, 9), (4, 8), (8, 24)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_ours_are_torchs_interleaved(ranks, microbatches, chunks, tmp_path):
    """Bubbles aside: torch writes those as empty cells, and a plan has none."""
    for split, cls in ((False, torch_schedules.ScheduleInterleaved1F1B), (True, torch_schedules.ScheduleInterleavedZeroBubble)):
        theirs = dumped(torch_interleaved(ranks, microbatches, chunks, cls), tmp_path)
        ours = build("interleaved-1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks, split_backward=split)
        assert ours.ranks == theirs.ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (4, 2), (4, 7), (8, 9)])
def test_ours_is_torchs_zb_v(ranks, microbatches, tmp_path):
    assert build("zb-v", ranks=ranks, microbatches=microbatches).ranks == dumped(torch_zb_v(ranks, microbatches), tmp_path).ranks


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_ours_is_torchs_dualpipe_v(ranks, microbatches):
    """With torch's overlapped pairs one after the other."""
    theirs = torch_dualpipe_v(ranks, microbatches).pipeline_order
    flat = [[str(part) for action in theirs[rank] for part in action.sub_actions or (action,)] for rank in range(ranks)]
    ours = build("dualpipe-v", ranks=ranks, microbatches=microbatches)
    assert [[str(action) for action in row] for row in ours.ranks] == flat


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES[1:])
def test_bubble_of_overlapped_pairs(ranks, microbatches):
    """DeepSeek's (PP/2 - 1) (F&B + B - 3W), PP = 2p, at unit times of a stage: replayed on torch's order, whose pairs hand
    over both of their values when they end."""
    rows = torch_dualpipe_v(ranks, microbatches).pipeline_order
    cost = {"F": 1, "I": 1, "W": 1, "B": 2}
    ends: dict[tuple[bool, int, int], int] = {}  # (is it a gradient, stage, micro-batch)
    free, first, at = [0] * ranks, [-1] * ranks, [0] * ranks
    while any(at[rank] < len(rows[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            while at[rank] < len(rows[rank]):
                parts = [_Parts(part) for part in rows[rank][at[rank]].sub_actions or (rows[rank][at[rank]],)]
                needs = [need for part in parts for need in part.needs(2 * ranks)]
                if not all(need in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                first[rank] = start if first[rank] < 0 else first[rank]
                free[rank] = start + sum(cost[part.kind] for part in parts)
                ends.update({part.key: free[rank] for part in parts if part.kind != "W"})
                at[rank] += 1
    longest = max(end - start for end, start in zip(free, first, strict=True))
    assert longest - 6 * microbatches == (ranks - 1) * (3 + 2 - 3)


class _Parts:
    def __init__(self, action) -> None:
        self.kind = action.computation_type.value
        self.key = (self.kind != "F", action.stage_index, action.microbatch_index)

    def needs(self, stages: int) -> list[tuple[bool, int, int]]:
        gradient, stage, microbatch = self.key
        source = stage + 1 if gradient else stage - 1
        return [(gradient, source, microbatch)] if self.kind != "W" and 0 <= source < stages else []


@pytest.mark.parametrize("make", [torch_zb_v, lambda ranks, m: torch_interleaved(ranks, m, 2)], ids=["zb-v", "interleaved"])
def test_torchs_csv_through_ours(make, tmp_path):
    """torch's CSV to a plan and back: the same bytes, but for the empty cells that torch writes for bubbles."""
    make(4, 8)._dump_csv(str(tmp_path / "torch.csv"), format="compute_only")
    without_bubbles = re.sub(rb"(?m)^,+|,+(?=[,\r])", b"", (tmp_path / "torch.csv").read_bytes())
    (tmp_path / "ours.csv").write_bytes(load(tmp_path / "torch.csv").to_csv().encode())
    assert (tmp_path / "ours.csv").read_bytes() == without_bubbles

    runtime = bare(torch_schedules._PipelineScheduleRuntime, 4, 8, 8)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    runtime._dump_csv(str(tmp_path / "again.csv"), format="compute_only")
    assert (tmp_path / "again.csv").read_bytes() == without_bubbles
