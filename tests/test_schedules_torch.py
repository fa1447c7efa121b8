"""Our plans in torch's pipeline engine, and torch's plans in ours. Nothing is run: orders and text only."""

import random

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from twobp_fx.errors import PlanError
from twobp_fx.schedules import SCHEDULES, Costs, Plan, build, load, simulate, validate


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


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_torch_loads_our_csv(name, split, tmp_path):
    plan = build(name, ranks=4, split_backward=split)
    path = tmp_path / "plan.csv"
    path.write_text(plan.to_csv())

    runtime = bare(torch_schedules._PipelineScheduleRuntime, 4, plan.stages, plan.microbatches)
    runtime._load_csv(str(path), format="compute_only")  # validates the order and adds the communication

    computed = [[str(action) for action in runtime.pipeline_order_with_comms[rank] if action.is_compute_op] for rank in range(4)]
    assert computed == [[str(action) for action in row] for row in plan.ranks]
    assert runtime.stage_index_to_group_rank == {stage: plan.rank_of_stage(stage) for stage in range(4)}


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


def torch_interleaved(ranks: int, microbatches: int, chunks: int):
    schedule = bare(torch_schedules.ScheduleInterleaved1F1B, ranks, chunks * ranks, microbatches)
    schedule.n_local_stages = chunks
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
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
