"""What users pass to `compile` and to a `Pipe`: checked, and resolved to the model, its stages, the plan and the devices."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import InputError, PlanError
from .inputs import Inputs
from .schedules import SCHEDULES, Plan, build, load, validate


def resolve_model(
    model: nn.Module | Sequence[nn.Module], stages: int | Sequence[str] | None
) -> tuple[nn.Module, int | tuple[str, ...]]:
    """One module, and into how many stages, or at which FQNs, to cut it. A sequence of modules is one stage a module."""
    if isinstance(model, nn.Module):
        if stages is None:
            raise InputError("stages= is missing: say how many, or the module FQNs at which a new stage begins.")
        whole = model
    else:
        whole, names = _chain(model)
        if stages is not None:
            raise InputError("A sequence of modules has one stage a module: leave stages= out.")
        stages = names
    _check_stages(stages)
    return whole, stages if isinstance(stages, int) else tuple(stages)


class _Chain(nn.Sequential):
    """Modules called one after the other; a tuple that one returns becomes the next one's arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for i, module in enumerate(self):
            args = (module(*args, **(kwargs if i == 0 else {})),)
            if isinstance(args[0], tuple):
                args = args[0]
        return args[0] if len(args) == 1 else args


def _chain(modules: object) -> tuple[nn.Module, tuple[str, ...]]:
    given = list(modules) if isinstance(modules, Sequence) and not isinstance(modules, str) else []
    if not given or not all(isinstance(module, nn.Module) for module in given):
        raise InputError(f"model must be a torch.nn.Module, or a sequence of at least one of them, not {modules!r}.")
    return _Chain(*given), tuple(str(i) for i in range(1, len(given)))


def _check_stages(stages: object) -> None:
    if isinstance(stages, int) and not isinstance(stages, bool) and stages >= 1:
        return
    if isinstance(stages, Sequence) and not isinstance(stages, str) and all(isinstance(fqn, str) for fqn in stages):
        return
    raise InputError(f"stages={stages!r}: give a positive number, or a list of module FQNs at which a new stage begins.")


def check_loss_fn(loss_fn: object) -> None:
    """Refuse a loss that is no function."""
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise InputError(
            f"loss_fn={loss_fn!r} is no function (output, target) -> loss. Of a class pass an instance: {_instance(loss_fn)}."
        )


def _instance(loss_fn: object) -> str:
    return f"{loss_fn.__name__}()" if isinstance(loss_fn, type) else "torch.nn.MSELoss()"


def check_example(args: object, kwargs: object) -> None:
    """Refuse an example whose arguments, if given, are not in a tuple and a mapping."""
    if not isinstance(args, (tuple, list, type(None))):
        raise InputError(f"example_args must be a tuple of arguments, not a {type(args).__name__}: (x,) for one.")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise InputError(f"example_kwargs must be a mapping from names to arguments, not a {type(kwargs).__name__}.")


def example_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: object) -> Inputs:
    """The inputs of a step, out of an example; takes `target` from `kwargs` if there is a loss_fn."""
    target = None
    if loss_fn is not None:
        if "target" not in kwargs:
            raise InputError("With a loss_fn, example_kwargs needs 'target', as pipe.step takes it.")
        target = kwargs.pop("target")
    return Inputs.flatten(args, kwargs, target)


def resolve_plan(schedule: str | Plan | os.PathLike[str], stages: int, microbatches: int | None, split_backward: bool) -> Plan:
    """The plan of a schedule that is named, given, or in a CSV file; a valid one, for this many stages and micro-batches."""
    if isinstance(schedule, Plan):
        plan = schedule
    elif isinstance(schedule, str) and (schedule in SCHEDULES or not schedule.endswith(".csv")):
        chunks = SCHEDULES[schedule].chunks if schedule in SCHEDULES else 1  # stages a rank
        if stages % chunks:
            raise PlanError(
                f"Schedule '{schedule}' puts {chunks} stages on each rank: give a multiple of {chunks}, not stages={stages}."
            )
        plan = build(schedule, ranks=stages // chunks, microbatches=microbatches, split_backward=split_backward)
    elif isinstance(schedule, (str, os.PathLike)):
        plan = load(schedule)
    else:
        raise PlanError(f"schedule={schedule!r} is neither a schedule's name, nor a Plan, nor the path of a CSV.")
    validate(plan)
    if plan.stages != stages:
        raise PlanError(f"Plan '{plan.name}' has {plan.stages} stages, and the model is to be cut into {stages}.")
    if microbatches is not None and plan.microbatches != microbatches:
        raise PlanError(f"Plan '{plan.name}' has {plan.microbatches} micro-batches, and microbatches={microbatches} was given.")
    return plan


def resolve_devices(devices: Sequence[torch.device | str] | None, ranks: int) -> tuple[torch.device, ...] | None:
    """One device a rank: those given, else all accelerators present; None for the CPU alone."""
    if devices is None:
        if not torch.accelerator.is_available():
            return None
        kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        return tuple(torch.device(f"{kind}:{rank * count // ranks}") for rank in range(ranks))
    try:
        given = tuple(torch.device(device) for device in ([] if isinstance(devices, (str, torch.device)) else devices))
    except (RuntimeError, TypeError) as error:
        raise InputError(f"devices={devices!r} must be a list of torch devices, one a rank: {str(error).splitlines()[0]}") from None
    if len(given) != ranks:
        raise InputError(f"devices= names {len(given)} devices, and the plan has {ranks} ranks: give one a rank.")
    return given


def check_step(target: object, loss_fn: object) -> None:
    """Refuse a step with a target that no loss_fn reads, and one under no_grad."""
    if target is not None and loss_fn is None:
        raise InputError("target= was given, but no loss_fn: pass loss_fn= to twobp_fx.compile, or give the model its labels.")
    if not torch.is_grad_enabled():
        raise InputError("pipe.step computes gradients and was called under no_grad. For the outputs alone call pipe(...).")


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: object) -> None:
    """Refuse arguments that the model's forward does not take."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        hint = " What loss_fn compares with goes in target=." if loss_fn is not None else ""
        raise InputError(f"{type(model).__name__}.forward does not take these arguments: {error}.{hint}") from None


def check_ready(inputs: Inputs, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse arguments, and parameters and buffers (`state`), that hold no data."""
    for path, tensor in zip(inputs.paths, inputs.tensors, strict=True):
        if tensor.is_meta:
            raise InputError(f"Argument {path} is on the meta device and has no data. Pass a real tensor.")
    for name, tensor in state.items():
        if is_lazy(tensor):
            raise InputError(f"'{name}' of a lazy module has no shape yet. Call the model once on a batch, then compile it.")
        if tensor.is_meta:
            raise InputError(
                f"'{name}' is on the meta device: the model can be captured and printed, not run. Materialize it first "
                "(model.to_empty(device=...), then initialize or load its weights)."
            )
