"""A pipeline as a plain, differentiable call: every stage's F in turn; in the backward every stage's B, last stage first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..program import StageProgram
from .autocast import as_traced
from .stage import StageRunner


def call_stages(
    programs: Sequence[StageProgram],
    output_names: Sequence[str],
    *,
    parameters: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    runners: Callable[[bool], list[StageRunner]],
) -> tuple[torch.Tensor, ...]:
    """The outputs of the last stage, differentiable with respect to `parameters` and `inputs`.

    The batch is one micro-batch. Gradients are those of the unsplit backward B, given to autograd, which does the rest: hooks,
    accumulation, retain_graph, torch.autograd.grad. Differentiating twice is refused by autograd's own message.
    """
    call = _Call(programs, tuple(output_names), tuple(parameters), len(inputs), runners)
    outputs = _PipeCall.apply(  # type: ignore[no-untyped-call]
        call, *parameters.values(), *inputs
    )
    return tuple(outputs)


class _Call:
    def __init__(
        self,
        programs: Sequence[StageProgram],
        output_names: tuple[str, ...],
        parameters: tuple[str, ...],
        inputs: int,
        runners: Callable[[bool], list[StageRunner]],
    ) -> None:
        self.programs = programs
        self.output_names = output_names
        self.parameters = parameters
        self.inputs = inputs
        self.runners = runners


class _PipeCall(torch.autograd.Function):
    """The call's forward and backward, as autograd sees them: one function of all parameters and inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run every F. What the stages hold is saved through autograd, which then notices when it is overwritten."""
        runners = call.runners(True)
        values: dict[str, torch.Tensor] = {}
        with as_traced(_devices(call.programs)):
            for runner in runners:
                values = runner.forward(0, values)
        held = [runner.release(0) for runner in runners]
        ctx.call = call
        ctx.names = [tuple(part) for part in held]
        ctx.save_for_backward(*(tensor for part in held for tensor in part.values()))
        ctx.set_materialize_grads(False)
        outputs = [values[name] for name in call.output_names]
        last = call.programs[-1].differentiable
        ctx.mark_non_differentiable(*(output for name, output in zip(call.output_names, outputs, strict=True) if name not in last))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run every B, last stage first."""
        call: _Call = ctx.call
        saved = iter(ctx.saved_tensors)
        runners = call.runners(False)  # a backward draws nothing
        for runner, names in zip(runners, ctx.names, strict=True):
            runner.resume(0, {name: next(saved) for name in names})
        values: dict[str, torch.Tensor | None] = {}
        for name, tangent in zip(call.output_names, tangents, strict=True):
            if tangent is not None:
                before = values.get(name)
                values[name] = tangent if before is None else before + tangent
        with as_traced(_devices(call.programs)):
            for runner in reversed(runners):
                values = runner.backward(0, values)
        return (
            None,
            *(_total(runner.gradients.get(name) for runner in runners) for name in call.parameters),
            *(
                _total(runner.input_gradients.get(0, {}).get(str(position)) for runner in runners)
                for position in range(call.inputs)
            ),
        )


def _devices(programs: Sequence[StageProgram]) -> set[torch.device]:
    return {value.device for program in programs for value in program.signatures["forward"].takes}


def _total(parts: Any) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total
