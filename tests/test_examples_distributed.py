from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from examples import gpt, text, torchrun_zero_bubble

ROOT = Path(__file__).parent.parent
TIMEOUT = 240  # seconds; for a machine that is busy with other things
WIDTH, DEPTH, STEPS, EVERY = 16, 4, 6, 2
SIZES = ("--width", str(WIDTH), "--depth", str(DEPTH), "--every", str(EVERY))

Losses = dict[int, str]


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for stream in (process.stdout, process.stderr):
            stream.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    script = ("-m", "examples.torchrun_zero_bubble", *SIZES)
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *script, *options)


def output_of(*command: str) -> str:
    with started(*command) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    assert err == ""  # no warnings
    return out


def losses_in(out: str) -> Losses:
    return {int(step): loss for step, loss in re.findall(r"^step +(\d+) +loss ([\d.]+)", out, re.M)}


def plain_losses(steps: int) -> dict[int, float]:
    torch.manual_seed(0)
    model = gpt.build(width=WIDTH, depth=DEPTH, length=torchrun_zero_bubble.LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = text.load()
    found = {}
    for step in range(1, steps + 1):
        x, y = text.batches(data, torchrun_zero_bubble.BATCH, model.length, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        found[step] = loss.item()
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(checkpoints: Path) -> Losses:
    return losses_in(output_of(*torchrun(2, "--compiler", "eager", "--steps", str(STEPS), "--checkpoint", str(checkpoints))))


def test_losses_are_those_of_plain_training(uninterrupted: Losses) -> None:
    expected = plain_losses(STEPS)
    assert list(uninterrupted) == [1, *range(EVERY, STEPS + 1, EVERY)]
    assert {step: float(loss) for step, loss in uninterrupted.items()} == {
        step: pytest.approx(expected[step], abs=1e-5) for step in uninterrupted
    }
    assert expected[STEPS] < expected[1]


def test_four_ranks_continue_with_the_losses_of_two(uninterrupted: Losses, checkpoints: Path, tmp_path: Path) -> None:
    first = f"step-{EVERY}"
    shutil.copytree(checkpoints / first, tmp_path / first)
    options = ("--schedule", "1F1B", "--compiler", "eager", "--steps", str(STEPS), "--checkpoint", str(tmp_path))
    resumed = losses_in(output_of(*torchrun(4, *options)))
    assert resumed == {step: loss for step, loss in uninterrupted.items() if step > EVERY}


def test_a_killed_rank_ends_the_run_and_the_next_continues(uninterrupted: Losses, tmp_path: Path) -> None:
    options = ("--compiler", "eager", "--checkpoint", str(tmp_path))
    with started(*torchrun(2, *options, "--steps", "100000")) as process:
        next(line for line in process.stdout if line.startswith(f"step {STEPS - EVERY:4d}"))
        rank = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1])
        os.kill(rank, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode != 0
    for later in tmp_path.glob("step-*"):
        if int(later.name.removeprefix("step-")) >= STEPS:
            shutil.rmtree(later)
    resumed = losses_in(output_of(*torchrun(2, *options, "--steps", str(STEPS))))
    assert resumed
    assert resumed.items() <= uninterrupted.items()
    assert STEPS in resumed
    assert 1 not in resumed


def test_too_many_ranks_for_a_schedule_are_said_once() -> None:
    with started(*torchrun(2, "--depth", "2")) as process:
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert err.count("ZBVZeroBubble over 2 ranks: 4 stages are too many for 2 blocks") == 1


def test_inductor_trains_under_torchrun(uninterrupted: Losses) -> None:
    found = losses_in(output_of(*torchrun(2, "--schedule", "InterleavedZeroBubble", "--steps", str(EVERY))))
    expected = {step: pytest.approx(float(loss), abs=1e-4) for step, loss in uninterrupted.items() if step <= EVERY}
    assert {step: float(loss) for step, loss in found.items()} == expected


def test_weight_gradients_put_off_by_hand() -> None:
    out = output_of("examples.torch_compile_backend", "--compiler", "eager", "--steps", "10", "--width", "16", "--depth", "2")
    assert "eager's, relative: 0.0e+00" in out
    assert len(re.findall(r"^ *[01] +graph \d/0: .*", out, re.M)) == 2  # the W's of both stages were pending
    losses = losses_in(out)
    assert float(losses[10]) < float(losses[1])
