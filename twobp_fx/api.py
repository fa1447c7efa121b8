"""`compile` and the `Pipe` it returns: the road from a model to gradients, a few calls long."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .arguments import (
    check_call,
    check_example,
    check_loss_fn,
    check_ready,
    check_step,
    example_inputs,
    resolve_devices,
    resolve_model,
    resolve_plan,
)
from .capture import LOSS_PREFIX, capture_forward
from .emit import Compiler, Emitter, emitter
from .errors import InputError
from .guards import attributes_among, input_guards, state_guards
from .inputs import Inputs
from .lower import lower
from .microbatches import dense, join_gradients, split_batch
from .program import Role, StageProgram
from .runtime.call import call_stages
from .runtime.gradients import accumulate, gradient_dtype, sum_up
from .runtime.local import run_plan, worker_threads
from .runtime.profile import profile_stages
from .runtime.stage import StageRunner, fresh_seed
from .schedules import ActionKind, Costs, Plan, Simulation, simulate

_CALLABLES = {
    ActionKind.F: "forward",
    ActionKind.I: "backward_input",
    ActionKind.W: "backward_weight",
    ActionKind.B: "backward",
}
_PROGRESS_DELAY = 2.0
_OWN = frozenset({"plan", "_model", "_cut", "_loss_fn", "_emitter", "_devices", "_lowered", "_latest", "_costs"})
_CAPTURING = threading.RLock()
"""Tracing and compiling go through state that torch keeps for the whole process: one thread at a time."""


def compile(
    model: nn.Module | Sequence[nn.Module],
    stages: int | Sequence[str] | None = None,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    microbatches: int | None = None,
    schedule: str | Plan | os.PathLike[str] = "1f1b-1",
    split_backward: bool = True,
    compiler: Compiler = "inductor",
    devices: Sequence[torch.device | str] | None = None,
) -> Pipe:
    """Make a pipeline of `stages` stages out of a model, its backward split into I and W.

    model: any module; or a sequence of modules, one a stage, each called with what the one before returned.
    stages: how many (balanced by cost), or the FQNs of the modules at which a new stage begins. Not given for a sequence.
    loss_fn: (output, target) -> 0-dimensional loss; None if the model returns its loss, or an object with `.loss`.
    example_args, example_kwargs: one micro-batch's arguments, to capture now; with a loss_fn, example_kwargs holds `target` too,
        as `step` takes it. Without them the model is captured at the first call.
    microbatches: how many a step splits its batch into; None for the schedule's own (as many as stages, for most).
    schedule: a name of `twobp_fx.schedules.SCHEDULES`, a Plan, or a path to a compute-only CSV.
    split_backward: False runs the same schedule with the unsplit backward B (a Plan or CSV is run as it stands).
    compiler: "inductor", "eager", or a callable (graph module, example inputs) -> callable.
    devices: one device a rank; None for every accelerator present, else the CPU. Parameters move to the device of their stage.

    The parameters stay the model's own objects. Raises InputError, PlanError, CaptureError, CutError, SplitError.
    """
    whole, cut = resolve_model(model, stages)
    check_loss_fn(loss_fn)
    check_example(example_args, example_kwargs)
    plan = resolve_plan(schedule, cut if isinstance(cut, int) else len(cut) + 1, microbatches, split_backward)
    pipe = Pipe(
        whole,
        cut,
        plan,
        loss_fn=loss_fn,
        emitter=emitter(compiler),
        devices=resolve_devices(devices, len(plan.ranks)),
    )
    if example_args is not None or example_kwargs is not None:
        example = example_inputs(tuple(example_args or ()), dict(example_kwargs or {}), loss_fn)
        pipe._latest = pipe._lower(example, want_loss=True)
    return pipe


@dataclass(frozen=True, slots=True)
class _Lowered:
    """One captured signature: its stage programs, and how to put its outputs back together."""

    programs: tuple[StageProgram, ...]
    outputs: Inputs
    output_names: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    read: tuple[tuple[nn.Module, str, torch.Tensor], ...]
    """The constants that are attributes of a module: (module, name, tensor). Once one is replaced, the capture is out of date."""


class Pipe(nn.Module):
    """A model as a pipeline. `step` trains on one batch; calling it is calling the model.

    It shares the model's own registries: parameters, buffers, state_dict, train(), eval(), zero_grad() are the model's, under the
    model's own FQNs. `stages` holds the stage programs; `plan` is what a step runs.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: int | tuple[str, ...],
        plan: Plan,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        emitter: Emitter,
        devices: tuple[torch.device, ...] | None,
    ) -> None:
        super().__init__()
        self.training = model.training
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.plan = plan
        self._model = model
        self._cut = stages
        self._loss_fn = loss_fn
        self._emitter = emitter
        self._devices = devices
        self._lowered: dict[Any, _Lowered] = {}
        self._latest: _Lowered | None = None
        self._costs: Costs | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the pipe takes along: not what was captured and compiled, which it makes again."""
        return {**vars(self), "_lowered": {}, "_latest": None}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. The pipe's own are plain ones, whatever the model's children are called."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def model(self) -> nn.Module:
        """The model this pipe was made of."""
        return self._model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state_dict."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own load_state_dict."""
        return self.model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Pipe:
        """Set the model to training (or, with False, to evaluation)."""
        self.model.train(mode)
        self.training = mode
        return self

    @property
    def stages(self) -> tuple[StageProgram, ...]:
        """The stage programs of the last step's signature. Raises InputError before anything was captured."""
        if self._latest is None:
            raise InputError("Nothing has been captured yet. Pass example_args= to twobp_fx.compile, or run pipe.step(...) once.")
        return self._latest.programs

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch: splits it into micro-batches, runs the plan, adds the mean gradients to `.grad`.

        args, kwargs: the model's; target: what loss_fn compares with. Tensors are split along dimension 0.
        Returns the mean loss over micro-batches, 0-dimensional, detached.
        Parameter hooks and post-accumulate-grad hooks fire once, at the end. Arguments that require a gradient get theirs.
        Raises InputError before anything runs if the batch does not split evenly; StageError if a stage raises, and then no
        gradient has changed.
        """
        inputs, microbatches, lowered = self._prepare(args, kwargs, target)
        loss = lowered.output_names[0]
        runners = self._runners(lowered, [[t.detach() for t in microbatch] for microbatch in microbatches])
        losses = run_plan(self.plan, runners, loss=loss, loss_gradient=1 / self.plan.microbatches, devices=self._devices)
        self._commit(runners, inputs)
        return torch.stack(losses).mean()

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, kinds: Iterable[ActionKind] | None = None
    ) -> tuple[Inputs, list[tuple[torch.Tensor, ...]], _Lowered]:
        """Check a step's arguments, capture what is new in them, and compile what the plan needs (or `kinds`)."""
        check_step(target, self._loss_fn)
        check_call(self.model, args, kwargs, self._loss_fn)
        inputs = Inputs.flatten(args, kwargs, target)
        check_ready(inputs, self._live_parameters() | self._live_buffers())
        microbatches = split_batch(inputs, self.plan.microbatches)
        first = replace(inputs, tensors=microbatches[0])
        lowered = self._latest = self._lower(first, want_loss=True)
        loss = lowered.output_names[0]
        if loss not in lowered.programs[-1].differentiable:
            raise InputError("The loss depends on nothing that requires a gradient: no parameter of the model does.")
        self._compile(lowered, kinds)
        return inputs, microbatches, lowered

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for the whole batch, run stage by stage; differentiable once, like any module call."""
        check_call(self.model, args, kwargs, self._loss_fn)
        given = Inputs.flatten(args, kwargs, None)
        check_ready(given, self._live_parameters() | self._live_buffers())
        inputs = replace(given, tensors=tuple(dense(tensor) for tensor in given.tensors))
        lowered = self._lower(inputs, want_loss=False)
        parameters = dict(self.model.named_parameters())
        outputs = call_stages(
            lowered.programs,
            lowered.output_names,
            parameters=parameters,
            inputs=inputs.tensors,
            runners=lambda draw: self._runners(lowered, [[t.detach() for t in inputs.tensors]], draw=draw),
        )
        return lowered.outputs.unflatten(outputs)[0]

    def profile(self, *args: Any, target: Any = None, repeats: int = 15, **kwargs: Any) -> Costs:
        """Measure each stage's F, I, W and B on one batch, as `step` takes it: median seconds and bytes a micro-batch.

        Runs the stages one after the other on this thread; changes no gradient and no buffer.
        Raises InputError as `step` does, and for repeats below 1.
        """
        if repeats < 1:
            raise InputError(f"repeats={repeats}: measure at least once.")
        _, microbatches, lowered = self._prepare(args, kwargs, target, kinds=ActionKind)
        inputs = [[t.detach() for t in microbatches[0]]] * 2
        self._costs = profile_stages(
            lowered.programs,
            lambda: self._runners(lowered, inputs, keep_buffers=True),
            loss=lowered.output_names[0],
            threads=worker_threads(len(self.plan.ranks)),
            repeats=repeats,
        )
        return self._costs

    def simulate(
        self, schedule: str | Plan | None = None, *, costs: Costs | None = None, microbatches: int | None = None
    ) -> Simulation:
        """Predict a step under another schedule (None: the pipe's own plan), without running it.

        costs: what actions take, in any unit; None for what `profile` measured last, in seconds.
        Raises InputError if nothing was measured, PlanError if the schedule does not fit the stages.
        """
        if costs is None and self._costs is None:
            raise InputError("Nothing has been measured yet: run pipe.profile(...) first, or pass costs=.")
        plan = self.plan if schedule is None else resolve_plan(schedule, self.plan.stages, microbatches, split_backward=True)
        return simulate(plan, costs or self._costs)

    def extra_repr(self) -> str:
        """What print(pipe) shows before the model's own parts."""
        return f"plan '{self.plan.name}': {self.plan.stages} stages, {self.plan.microbatches} micro-batches"

    def _lower(self, inputs: Inputs, *, want_loss: bool) -> _Lowered:
        key = (want_loss, input_guards(inputs), *state_guards(self._owners(), self._loss_fn))
        with _CAPTURING:
            known = self._lowered.get(key)
            if known is not None and all(vars(module).get(name) is tensor for module, name, tensor in known.read):
                return known
            devices = self._stage_devices()
            captured = capture_forward(
                self.model,
                inputs,
                loss_fn=self._loss_fn if want_loss else None,
                want_loss=want_loss,
                device=None if devices is None else devices[0],
            )
            programs = lower(
                captured,
                self._cut,
                trainable={name: p.requires_grad for name, p in self._live_parameters().items()},
                differentiable_inputs=frozenset(str(i) for i, t in enumerate(inputs.tensors) if t.requires_grad),
                emitter=self._emitter,
                devices=devices,
                gradient_dtypes={name: gradient_dtype(p) for name, p in self._live_parameters().items()},
            )
            read = attributes_among(captured.constants, self._owners())
            self._lowered[key] = _Lowered(programs, captured.outputs, captured.output_names, captured.constants, read)
            return self._lowered[key]

    def _owners(self) -> list[nn.Module]:
        return [self.model, *([self._loss_fn] if isinstance(self._loss_fn, nn.Module) else [])]

    def _stage_devices(self) -> list[torch.device] | None:
        if self._devices is None:
            return None
        return [self._devices[self.plan.rank_of_stage(stage)] for stage in range(self.plan.stages)]

    def _move_home(self, lowered: _Lowered) -> None:
        """Move each parameter and buffer, in place, to the device of the first stage that reads it."""
        if self._devices is None:
            return
        live: dict[str, torch.Tensor] = {**self._live_parameters(), **self._live_buffers()}
        settled: set[str] = set()
        for program in lowered.programs:
            for value in program.signatures["forward"].takes:
                if value.role in (Role.PARAMETER, Role.BUFFER) and value.key not in settled:
                    settled.add(value.key)
                    tensor = live[value.key]
                    if tensor.device != value.device:
                        tensor.data = tensor.data.to(value.device)
                        if tensor.grad is not None:
                            tensor.grad = tensor.grad.to(value.device)

    def _live_parameters(self) -> dict[str, torch.Tensor]:
        parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if isinstance(self._loss_fn, nn.Module):
            parameters |= {LOSS_PREFIX + name: p for name, p in self._loss_fn.named_parameters()}
        return parameters

    def _live_buffers(self) -> dict[str, torch.Tensor]:
        buffers = dict(self.model.named_buffers())
        if isinstance(self._loss_fn, nn.Module):
            buffers |= {LOSS_PREFIX + name: b for name, b in self._loss_fn.named_buffers()}
        return buffers

    def _compile(self, lowered: _Lowered, kinds: Iterable[ActionKind] | None = None) -> None:
        """Compile what the plan asks for and is not compiled yet, for as many threads as a worker will have."""
        wanted = [
            (program, _CALLABLES[kind])
            for program in lowered.programs
            for kind in sorted(self.plan.kinds(program.index) if kinds is None else kinds)
            if not program.is_prepared(_CALLABLES[kind])
        ]
        if not wanted:
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(worker_threads(len(self.plan.ranks)))
        try:
            with _CAPTURING, tqdm(wanted, desc="compiling", unit="graph", delay=_PROGRESS_DELAY, leave=False) as progress:
                for program, name in progress:
                    progress.set_postfix_str(f"stage {program.index} {name}", refresh=False)
                    program.prepare(name)
        finally:
            torch.set_num_threads(threads)

    def _runners(
        self, lowered: _Lowered, inputs: list[list[torch.Tensor]], *, draw: bool = True, keep_buffers: bool = False
    ) -> list[StageRunner]:
        self._move_home(lowered)
        parameters = {name: p.detach() for name, p in self._live_parameters().items()}
        buffers = self._live_buffers()
        if keep_buffers:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        seed = fresh_seed() if draw and any(program.draws for program in lowered.programs) else 0
        return [
            StageRunner(
                program,
                parameters=parameters,
                buffers=buffers,
                constants=lowered.constants,
                inputs=inputs,
                seed=seed,
            )
            for program in lowered.programs
        ]

    def _commit(self, runners: Sequence[StageRunner], inputs: Inputs) -> None:
        """Hand the summed gradients to autograd's own accumulation, one parameter at a time, so that every hook fires once."""
        parameters = self._live_parameters()
        for runner in runners:
            for name in list(runner.gradients):  # a parameter that several stages use gets the sum
                sums = [each.gradients.pop(name) for each in runners if name in each.gradients]
                accumulate([parameters[name]], functools.partial(sum_up, sums))
        roots: list[torch.Tensor] = []
        totals: list[torch.Tensor] = []
        for position, tensor in enumerate(inputs.tensors):
            parts = [
                [gradients[str(position)] for _, gradients in sorted(runner.input_gradients.items()) if str(position) in gradients]
                for runner in runners
            ]
            wholes = [join_gradients(part, tensor).to(tensor.device) for part in parts if part]
            if wholes:
                roots.append(tensor)
                totals.append(torch.stack(wholes).sum(0))
        if roots:  # all at once: they may come out of one graph
            torch.autograd.backward(roots, totals)
