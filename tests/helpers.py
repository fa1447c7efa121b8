"""Helpers of the graph tests: lower a module to stages, run their backward split and unsplit, and plain autograd."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from twobp_fx.capture import capture_forward
from twobp_fx.emit import Emitter
from twobp_fx.inputs import Inputs
from twobp_fx.lower import lower
from twobp_fx.passes.aot import GradAOTOutput, ParamAOTInput, PlainAOTInput
from twobp_fx.passes.graph import operations, output_descriptors, output_node, outputs, placeholders
from twobp_fx.program import StageProgram
from twobp_fx.runtime.stage import StageRunner

Gradients = dict[str, Tensor | None]
"""Gradients by name: a parameter's FQN, or `input <position>`."""


def leaf(*shape: int) -> Tensor:
    """A random tensor that requires a gradient."""
    return torch.randn(*shape, requires_grad=True)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A module lowered to stages, with what running it takes."""

    model: nn.Module
    args: tuple[Tensor, ...]
    programs: tuple[StageProgram, ...]
    output_names: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def program(self) -> StageProgram:
        """The one stage."""
        (program,) = self.programs
        return program

    def runners(self, microbatches: Sequence[Sequence[Tensor]] | None = None, model: nn.Module | None = None) -> list[StageRunner]:
        """Fresh runners over the live parameters and buffers of `model` (the lowered one unless given)."""
        owner = self.model if model is None else model
        inputs = [self.args] if microbatches is None else microbatches
        return [
            StageRunner(
                program,
                parameters={name: p.detach() for name, p in owner.named_parameters()},
                buffers=dict(owner.named_buffers()),
                constants=self.constants,
                inputs=[[t.detach() for t in microbatch] for microbatch in inputs],
                seed=7,
            )
            for program in self.programs
        ]


def lower_module(
    model: nn.Module,
    *args: Tensor,
    stages: int | Sequence[str] = 1,
    emitter: Emitter | None = None,
) -> Lowered:
    """Lower `model`, called with `args`. Arguments that require a gradient get one, as in a middle stage."""
    captured = capture_forward(model, Inputs.flatten(args, {}, None), want_loss=False)
    programs = lower(
        captured,
        stages,
        trainable={name: p.requires_grad for name, p in model.named_parameters()},
        differentiable_inputs=frozenset(str(i) for i, t in enumerate(args) if t.requires_grad),
        emitter=Emitter("eager") if emitter is None else emitter,
    )
    return Lowered(model, args, programs, captured.output_names, captured.constants)


def tangents_for(lowered: Lowered, seed: int = 1) -> dict[str, Tensor]:
    """A random tangent for every differentiable output, by the name of the output; the same for the same seed."""
    results = call(copy.deepcopy(lowered.model), lowered.args)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, dtype=torch.float64, generator=generator).to(value.dtype)
        for name, value in zip(lowered.output_names, results, strict=True)
        if name in lowered.programs[-1].differentiable
    }


def call(model: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    """The tensors `model` returns."""
    return list(Inputs.flatten(model(*args)).tensors)


def run(
    lowered: Lowered,
    tangents: Mapping[str, Tensor | None],
    *,
    split: bool,
    model: nn.Module | None = None,
) -> tuple[list[Tensor], Gradients]:
    """One micro-batch through all stages: the outputs, and the gradients by I then W, or by B. Updates the buffers."""
    with torch.no_grad():
        runners = lowered.runners(model=model)
        values: dict[str, Any] = {}
        for runner in runners:
            values = runner.forward(0, values)
        results = [values[name] for name in lowered.output_names]
        back: Mapping[str, Tensor | None] = tangents
        for runner in reversed(runners):
            back = runner.backward_input(0, back) if split else runner.backward(0, back)
        if split:
            for runner in runners:
                runner.backward_weight(0)
    gradients: Gradients = {}
    for runner in runners:
        assert runner.held == 0
        for name, value in runner.gradients.items():
            add(gradients, name, value)
        for key, value in runner.input_gradients.get(0, {}).items():
            add(gradients, f"input {key}", value)
    return results, gradients


def run_microbatches(
    lowered: Lowered,
    microbatches: Sequence[Sequence[Tensor]],
    tangents: Sequence[Mapping[str, Tensor]],
    *,
    split: bool,
) -> Gradients:
    """One stage, several micro-batches: every F, then every I and every W (or every B). Sums parameter gradients."""
    (runner,) = lowered.runners(microbatches)
    with torch.no_grad():
        for i in range(len(microbatches)):
            runner.forward(i, {})
        for i, given in enumerate(tangents):
            (runner.backward_input if split else runner.backward)(i, given)
        for i in range(len(microbatches) if split else 0):
            runner.backward_weight(i)
    gradients: Gradients = dict(runner.gradients)
    for i, by_input in runner.input_gradients.items():
        gradients |= {f"input {key} of {i}": value for key, value in by_input.items()}
    return gradients


def autograd_microbatches(
    lowered: Lowered, microbatches: Sequence[Sequence[Tensor]], tangents: Sequence[Mapping[str, Tensor]]
) -> Gradients:
    """What `run_microbatches` returns, by plain autograd."""
    gradients: Gradients = {}
    for i, (args, given) in enumerate(zip(microbatches, tangents, strict=True)):
        _, parts = autograd(lowered.model, args, [given.get(name) for name in lowered.output_names])
        for name, value in parts.items():
            assert value is not None
            add(gradients, f"{name} of {i}" if name.startswith("input ") else name, value)
    return gradients


def add(gradients: Gradients, name: str, value: Tensor) -> None:
    """Add one part of a gradient that several stages compute."""
    before = gradients.get(name)
    gradients[name] = value if before is None else before + value


def autograd(model: nn.Module, args: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[list[Tensor], Gradients]:
    """Plain autograd on a copy of `model`: outputs, and the gradients that exist. Changes neither model nor `args`."""
    model = copy.deepcopy(model)
    args = [t.detach().clone().requires_grad_(t.requires_grad) for t in args]
    results = call(model, args)
    pairs = [
        (result, tangent) for result, tangent in zip(results, tangents, strict=True) if result.requires_grad and tangent is not None
    ]
    torch.autograd.backward([result for result, _ in pairs], [tangent for _, tangent in pairs])
    gradients: Gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {i}": t.grad for i, t in enumerate(args) if t.grad is not None}
    return [result.detach() for result in results], gradients


def assert_split_is_exact(lowered: Lowered, tangents: Mapping[str, Tensor | None] | None = None, **tolerance: float) -> Gradients:
    """I then W is bitwise B, and both are plain autograd: outputs, gradients, buffers. Returns the gradients."""
    given: Mapping[str, Tensor | None] = tangents_for(lowered) if tangents is None else tangents
    split_model, whole_model = copy.deepcopy(lowered.model), copy.deepcopy(lowered.model)
    outputs_split, split = run(lowered, given, split=True, model=split_model)
    outputs_whole, whole = run(lowered, given, split=False, model=whole_model)
    assert split.keys() == whole.keys()
    for name in split:
        assert equal(split[name], whole[name]), f"gradient of {name}: I then W differs from B"

    eager_model = copy.deepcopy(lowered.model)
    call(eager_model, lowered.args)
    expected_outputs, expected = autograd(lowered.model, lowered.args, [given.get(n) for n in lowered.output_names])
    torch.testing.assert_close(outputs_split, expected_outputs, **tolerance)
    assert all(equal(a, b) for a, b in zip(outputs_split, outputs_whole, strict=True))
    assert split.keys() == expected.keys(), "a gradient that eager leaves None must stay None, and no other may"
    for name in expected:
        origin = f"gradient of {name}: "
        torch.testing.assert_close(split[name], expected[name], msg=lambda m, o=origin: o + m, **tolerance)
    for name, buffer in eager_model.named_buffers():
        torch.testing.assert_close(split_model.get_buffer(name), buffer, **tolerance)
    return split


def equal(first: Tensor | None, second: Tensor | None) -> bool:
    """Bitwise equal; None only equals None."""
    if first is None or second is None:
        return first is second
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(*(each.detach().contiguous().flatten().view(torch.uint8) for each in (first, second)))


def joint_graph(module: nn.Module, *args: Tensor, decompositions: Mapping[Any, Callable[..., Any]] | None = None) -> fx.GraphModule:
    """AOTAutograd's own joint graph of a module, without this project's capture."""
    with contextlib.ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, args, decompositions=dict(decompositions or {})).graph_module


def backward_graph(
    function: Callable[..., Sequence[Tensor]], inputs: Mapping[str, Tensor], gradients_of: Sequence[str]
) -> fx.GraphModule:
    """A hand-made backward graph: `function` of the named inputs, returning a gradient of each of `gradients_of`.

    `x`, or a name that begins with `x`, stands for an input of the stage, any other name for a parameter.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(value) for value in inputs.values()]
        module = make_fx(function, tracing_mode="real")(*fakes)
    for node, name in zip(placeholders(module.graph), inputs, strict=True):
        node.name = node.target = name
    output_node(module.graph).meta["desc"] = [
        GradAOTOutput(PlainAOTInput(i) if name.startswith("x") else ParamAOTInput(name)) for i, name in enumerate(gradients_of)
    ]
    module.recompile()
    return module


def run_graph(module: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    """Run a graph on values by name of its placeholders; returns a list."""
    return list(module(*(values[node.name] for node in placeholders(module.graph))))


def run_halves(
    backward_input: fx.GraphModule, backward_weight: fx.GraphModule, stash: Sequence[str], values: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """I, then W on what I stashed: the input gradients, and the parameter gradients."""
    results = run_graph(backward_input, values)
    count = len(results) - len(stash)
    return results[:count], run_graph(backward_weight, {**values, **dict(zip(stash, results[count:], strict=True))})


def targets(module: fx.GraphModule) -> list[str]:
    """The operators of a graph, in order, by their short names."""
    return [_target(node) for node in operations(module.graph)]


_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
    torch.uint8: "u8",
}


def graph_text(module: fx.GraphModule) -> str:
    """A graph as text: one line a value, and what is returned, each gradient with whose it is."""
    lines: list[str] = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            said = _described(node.meta.get("desc"))
            right = f"input({said})" if said else "input()"
        else:
            arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
            right = f"{_target(node)}({', '.join(arguments)})"
        lines.append(f"%{node.name} = {right} : {_type(node.meta.get('val'))}")
    returned = [
        _argument(value) + (f" as {said}" if (said := _described(descriptor)) else "")
        for value, descriptor in zip(outputs(module.graph), output_descriptors(module.graph), strict=True)
    ]
    lines.append("return " + (", ".join(returned) or "nothing"))
    return "\n".join(lines)


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_DTYPES.get(value.dtype, value.dtype)}{[*value.shape]}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    return "none" if value is None else type(value).__name__


def _described(descriptor: Any) -> str:
    """What a descriptor says, short: a parameter's name, `x0` for the stage's input 0, `d ...` for a gradient."""
    kind = type(descriptor).__name__
    if descriptor is None:
        return ""
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        return str(descriptor.target)
    if kind == "PlainAOTInput":
        return f"x{descriptor.idx}"
    if kind == "PlainAOTOutput":
        return f"y{descriptor.idx}"
    if kind == "TangentAOTInput":
        return f"d {_described(descriptor.output)}"
    if kind == "GradAOTOutput":
        return f"d {_described(descriptor.grad_of)}"
    if kind == "InputMutationAOTOutput":
        return f"new {_described(descriptor.mutated_input)}"
    return str(descriptor)
