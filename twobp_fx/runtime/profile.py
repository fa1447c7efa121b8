"""Measure what each stage's F, I, W and B take on this machine: the costs that the simulator reckons with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..program import Role, StageProgram
from ..schedules import Costs
from .stage import StageRunner


def profile_stages(
    programs: Sequence[StageProgram],
    runners: Callable[[], list[StageRunner]],
    *,
    loss: str,
    threads: int,
    repeats: int,
) -> Costs:
    """Median seconds of each stage's F, I, W and B for one micro-batch, and the bytes it sends, saves and holds.

    runners: makes the runners of a step with two micro-batches. The second is timed: its gradients are added to what is there, as
    all but the first of a step are. Every repetition goes through all stages, one after the other, on this thread with `threads`
    intra-op threads; the first one warms up. Nothing is committed to `.grad`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    watch = _Watch()
    try:
        with torch.no_grad():
            for repeat in range(repeats + 1):
                for split in (True, False):
                    stages = runners()
                    for microbatch in (0, 1):
                        watch.running = repeat > 0 and microbatch == 1
                        _run_through(stages, microbatch, loss, split, watch)
    finally:
        torch.set_num_threads(before)
    return Costs(
        forward=watch.medians("F", len(programs)),
        backward_input=watch.medians("I", len(programs)),
        backward_weight=watch.medians("W", len(programs)),
        backward=watch.medians("B", len(programs)),
        comm_bytes=[_sent_bytes(program) for program in programs],
        saved=[program.memory.saved for program in programs],
        held_for_weight=[program.memory.held_for_weight for program in programs],
    )


class _Watch:
    """Collects times by stage and kind of action while it is `running`."""

    def __init__(self) -> None:
        self.running = False
        self._times: dict[tuple[str, int], list[float]] = {}

    @contextmanager
    def time(self, kind: str, stage: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if self.running:
            self._times.setdefault((kind, stage), []).append(time.perf_counter() - start)

    def medians(self, kind: str, stages: int) -> list[float]:
        return [statistics.median(self._times[kind, stage]) for stage in range(stages)]


def _run_through(stages: Sequence[StageRunner], microbatch: int, loss: str, split: bool, watch: _Watch) -> None:
    values: dict[str, torch.Tensor] = {}
    for index, runner in enumerate(stages):
        with watch.time("F", index):
            values = runner.forward(microbatch, values)
    tangents: Mapping[str, torch.Tensor | None] = {loss: torch.ones_like(values[loss])}
    for index, runner in reversed(list(enumerate(stages))):
        if split:
            with watch.time("I", index):
                tangents = runner.backward_input(microbatch, tangents)
            with watch.time("W", index):
                runner.backward_weight(microbatch)
        else:
            with watch.time("B", index):
                tangents = runner.backward(microbatch, tangents)


def _sent_bytes(program: StageProgram) -> int:
    sent = [value for value in program.signatures["forward"].returns if value.role is Role.SENT]
    carried = [value for value in program.signatures["forward"].takes if value.role is Role.RECEIVED and value.key in program.sends]
    return sum(value.nbytes for value in (*sent, *carried))
