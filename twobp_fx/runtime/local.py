"""The in-process executor: one worker thread a rank, values handed between neighbours, nothing that can wait for ever.

On accelerators each rank has a device and a stream of its own; a value handed on carries an event that its reader waits for. On
the CPU the workers overlap because compiled kernels and torch's operators release the interpreter lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from ..errors import StageError
from ..schedules import Action, ActionKind, Plan
from .stage import StageRunner

Values = dict[str, torch.Tensor | None]


class _AbortedError(Exception):
    """Another worker failed, or the caller was interrupted: stop."""


class _Mailbox:
    """Values on their way from one action to another. Whoever waits is woken by the value or by `abort`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._values: dict[tuple[int, str, int], tuple[Values, Any]] = {}
        self._aborted = False

    def put(self, stage: int, direction: str, microbatch: int, values: Values, event: Any) -> None:
        with self._condition:
            self._values[stage, direction, microbatch] = (values, event)
            self._condition.notify_all()

    def take(self, stage: int, direction: str, microbatch: int) -> tuple[Values, Any]:
        key = (stage, direction, microbatch)
        with self._condition:
            self._condition.wait_for(lambda: self._aborted or key in self._values)
            if self._aborted:
                raise _AbortedError
            return self._values.pop(key)

    def abort(self) -> None:
        with self._condition:
            self._aborted = True
            self._condition.notify_all()

    @property
    def aborted(self) -> bool:
        return self._aborted


class _Step:
    """One run of a plan: what its workers share."""

    def __init__(self, plan: Plan, runners: Sequence[StageRunner], loss: str, loss_gradient: float) -> None:
        self.plan = plan
        self.runners = runners
        self.loss = loss
        self.loss_gradient = loss_gradient
        self.mailbox = _Mailbox()
        self.losses: dict[int, torch.Tensor] = {}
        self.failure: tuple[Action, BaseException] | None = None
        self._lock = threading.Lock()

    def work(self, rank: int, device: torch.device | None, threads: int) -> None:
        """Run one rank's actions in order; on failure tell everybody."""
        action = self.plan.ranks[rank][0]
        try:
            with torch.no_grad(), _placed(device, threads) as stream:
                for action in self.plan.ranks[rank]:
                    if self.mailbox.aborted:
                        return
                    self._run(action, stream)
                if stream is not None:
                    stream.synchronize()
        except _AbortedError:
            return
        except BaseException as error:  # whatever it is, the other workers must not wait for this one
            with self._lock:
                self.failure = self.failure or (action, error)
            self.mailbox.abort()

    def _run(self, action: Action, stream: Any) -> None:
        stage, microbatch = action.stage, action.microbatch
        runner = self.runners[stage]
        if action.kind is ActionKind.F:
            sent = runner.forward(microbatch, self._receive(stage, "F", microbatch, stream) if stage else {})
            if stage + 1 == len(self.runners):
                self.losses[microbatch] = sent[self.loss].detach()
            else:
                self._send(stage + 1, "F", microbatch, sent, stream)
        elif action.kind is ActionKind.W:
            runner.backward_weight(microbatch)
        else:
            tangents: Mapping[str, torch.Tensor | None]
            if stage + 1 == len(self.runners):
                tangents = {self.loss: torch.full_like(self.losses[microbatch], self.loss_gradient)}
            else:
                tangents = self._receive(stage, "B", microbatch, stream)
            run = runner.backward_input if action.kind is ActionKind.I else runner.backward
            gradients = run(microbatch, tangents)
            if stage:
                self._send(stage - 1, "B", microbatch, gradients, stream)

    def _send(self, stage: int, direction: str, microbatch: int, values: Mapping[str, torch.Tensor | None], stream: Any) -> None:
        event = None if stream is None else stream.record_event()
        self.mailbox.put(stage, direction, microbatch, dict(values), event)

    def _receive(self, stage: int, direction: str, microbatch: int, stream: Any) -> Any:
        values, event = self.mailbox.take(stage, direction, microbatch)
        if event is None:
            return values
        stream.wait_event(event)
        for value in values.values():
            if value is not None:
                value.record_stream(stream)
        return values


@contextlib.contextmanager
def _placed(device: torch.device | None, threads: int) -> Iterator[Any]:
    """A worker's surroundings: its share of the cores on the CPU, its device and a stream of its own on an accelerator."""
    if device is None or device.type == "cpu":
        torch.set_num_threads(threads)  # counts for this thread's own kernels only
        yield None
        return
    torch.accelerator.set_device_index(device)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield stream


def worker_threads(ranks: int) -> int:
    """Intra-op threads a worker gets when `ranks` of them share the CPU: torch.get_num_threads() over ranks, at least one."""
    return max(1, torch.get_num_threads() // ranks)


def run_plan(
    plan: Plan,
    runners: Sequence[StageRunner],
    *,
    loss: str,
    loss_gradient: float,
    devices: Sequence[torch.device] | None = None,
) -> list[torch.Tensor]:
    """Run a validated plan over the stages' runners; returns each micro-batch's loss, in order.

    loss: the name under which the last stage sends it. loss_gradient: what each micro-batch's loss is weighed with.
    devices: one a rank; None runs all ranks on the CPU.
    Raises StageError if a stage raised, after all workers have stopped. Interrupting it (Ctrl-C) stops the workers too.
    """
    step = _Step(plan, runners, loss, loss_gradient)
    caller_threads = torch.get_num_threads()
    threads = worker_threads(len(plan.ranks))
    with ThreadPoolExecutor(len(plan.ranks), thread_name_prefix="twobp rank") as pool:
        try:
            wait(
                [
                    pool.submit(step.work, rank, None if devices is None else devices[rank], threads)
                    for rank in range(len(plan.ranks))
                ]
            )
        except BaseException:  # Ctrl-C, most likely: leaving the pool waits for the workers, and nothing makes them wait any more
            step.mailbox.abort()
            raise
        finally:
            torch.set_num_threads(caller_threads)  # the workers' calls changed what threads started later would get
    if step.failure is not None:
        action, error = step.failure
        step.failure = None  # the error's traceback leads back here: without this they would keep each other, and all values, alive
        runner = runners[action.stage]
        for each in runners:
            each.clear()
        raise StageError(
            f"Stage {action.stage} ({runner.program.modules}) raised at action {action} of plan '{plan.name}': "
            f"{type(error).__name__}: {error}\nNo gradient was changed; buffers may have seen some of the micro-batches. "
            "The model can be used on.",
            action=str(action),
            stage=action.stage,
        ) from error
    return [step.losses[microbatch] for microbatch in range(plan.microbatches)]
