"""`torch.compile(module, backend="twobp")`: Dynamo's graphs, compiled with a backward that comes in two halves when asked.

Dynamo captures, AOTAutograd traces the joint graph and runs it (aliases, mutations, symbolic sizes, saved tensors: its business),
and the passes split its backward. A plain backward runs B whole; under `defer_weight_grads` I runs and W waits.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch.autograd.graph import Node

from .deferral import Deferral, WeightGradients, live_node_of, new_anchor
from .emit import Compiler, Emitter, emitter
from .errors import InputError
from .passes.aot import GradAOTOutput, ParamAOTInput, PlainAOTInput, gradients
from .passes.graph import build_graph, module_fqn, operations, output_node, outputs, placeholders
from .passes.partition_joint import refuse_draws
from .passes.split_backward import split_backward
from .passes.unfuse_backward import unfuse_backward
from .program import Compiled
from .runtime.strides import with_strides

_OPTIONS = {"compiler": "inductor"}


def twobp(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that `torch.compile` finds by its name, "twobp".

    options: `{"compiler": ...}`, as `twobp_fx.compile` takes it; "inductor" if not given. Raises InputError for any other option
    and for a mode, SplitError for a backward that would draw random numbers, CompileError with the compiler's own reason.
    """
    compiler = _compiler(mode, options or {})
    return CompiledGraph(module, example_inputs, emitter(compiler)).function


class CompiledGraph:
    """One of Dynamo's graphs, compiled.

    function: takes the graph's inputs and returns its outputs, differentiable by autograd. Its node in autograd's graph has a slot
    for each tensor it takes: first the anchor, then the graph's inputs. parameters: the slots of parameters, with their names.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], emit: Emitter) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self._emitter = emit
        self._anchor = new_anchor(self)
        self.label = _label(module)
        self.deferred: dict[Node, Deferral] = {}
        takes = [(self._anchor, "anchor")]
        takes += [(example, _name(node)) for node, example in zip(placeholders(module.graph), example_inputs, strict=True)]
        self.positions = [position for position, (example, _) in enumerate(takes) if isinstance(example, torch.Tensor)]
        self.parameters = {
            slot: takes[position][1]
            for slot, position in enumerate(self.positions)
            if isinstance(takes[position][0], torch.nn.Parameter) and takes[position][0].requires_grad
        }
        compiled = aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=self._compile_backward,
            partition_fn=_partition,
            decompositions=dict(emit.decompositions),
        )(_with_anchor(module), [example for example, _ in takes])
        self.function = _disable(functools.partial(compiled, self._anchor))

    def _compile_forward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _keep_backward_repeatable()
        return _boxed(self._emitter.emit(module, f"{self.label}, forward"))

    def _compile_backward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _boxed(_Backward(self, module, self._emitter, self._anchor))


class _Backward:
    """B of one graph; and its halves, made when first asked for."""

    def __init__(self, graph: CompiledGraph, module: fx.GraphModule, emit: Emitter, anchor: torch.Tensor) -> None:
        self._graph = graph
        self._anchor = anchor
        self._emitter = emit
        self._takes = tuple(node.name for node in placeholders(module.graph))
        self._returns = len(outputs(module.graph))
        slots = {position: slot for slot, position in enumerate(graph.positions)}
        self._module = _of_slots(module, [slots.get(position, -1) for position in range(self._returns)])
        unfuse_backward(self._module)
        self._whole: _Part | None = None
        self._halves: dict[frozenset[int], tuple[_Part, _Part]] = {}
        self._lock = threading.Lock()  # a backward may run in any thread

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradients of all that the graph takes; None for what has none, and for what is put off."""
        values = dict(zip(self._takes, args, strict=True))
        node = live_node_of(self._anchor)
        deferral = None if node is None else self._graph.deferred.get(node)
        results: list[torch.Tensor | None] = [None] * self._returns
        if deferral is None:
            whole = self._compiled_whole()
            for of, gradient in zip(whole.gradients_of, whole(whole.pick(values)), strict=True):
                results[self._graph.positions[_slot(of)]] = gradient
            return results
        first, second = self._compiled_halves(frozenset(deferral.kept))
        for name, of, result in zip(first.returns, first.gradients_of, first(first.pick(values)), strict=True):
            if of is None:
                values[name] = result
            else:
                results[self._graph.positions[_slot(of)]] = result
        self._put_off(second, values, deferral)
        return results

    def _put_off(self, second: _Part, values: Mapping[str, Any], deferral: Deferral) -> None:
        wanted = [(i, _slot(of)) for i, of in enumerate(second.gradients_of) if _slot(of) in deferral.parameters]
        if not wanted:
            return

        def compute(held: Sequence[Any]) -> Sequence[torch.Tensor | None]:
            results = second(list(held))
            return [results[i] for i, _ in wanted]

        names = self._graph.parameters
        deferral.pending.add(
            WeightGradients(
                self._graph.label,
                {names[slot]: deferral.parameters[slot] for _, slot in wanted},
                {names[slot]: why for slot, why in deferral.kept.items()},
                second.pick(values),
                compute,
            )
        )

    def _compiled_whole(self) -> _Part:
        with self._lock:
            if self._whole is None:
                self._whole = _Part(self._module, self._emitter, f"{self._graph.label}, backward")
            return self._whole

    def _compiled_halves(self, kept: frozenset[int]) -> tuple[_Part, _Part]:
        """I and W, where the parameters of the `kept` slots count as inputs."""
        with self._lock:
            if kept not in self._halves:
                every = [_slot(of) for _, of in gradients(self._module.graph)]
                split = split_backward(_of_slots(self._module, every, self._graph.parameters.keys() - kept))
                self._halves[kept] = (
                    _Part(split.backward_input, self._emitter, f"{self._graph.label}, backward_input"),
                    _Part(split.backward_weight, self._emitter, f"{self._graph.label}, backward_weight"),
                )
            return self._halves[kept]


class _Part:
    """A compiled graph and the names of what it takes and returns. Tensors reach it with the strides it was compiled for."""

    def __init__(self, module: fx.GraphModule, emit: Emitter, label: str) -> None:
        self.takes = tuple(node.name for node in placeholders(module.graph))
        self.returns = tuple(node.name if isinstance(node, fx.Node) else "" for node in outputs(module.graph))
        self.gradients_of = tuple(
            descriptor.grad_of if isinstance(descriptor, GradAOTOutput) else None
            for descriptor in output_node(module.graph).meta.get("desc", ())
        )
        self._layouts = [node.meta["val"] for node in placeholders(module.graph)]
        self._function: Compiled = emit.emit(module, label)

    def pick(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[name] for name in self.takes]

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return self._function([_conform(arg, layout) for arg, layout in zip(args, self._layouts, strict=True)])


def _conform(value: Any, traced: Any) -> Any:
    """With the strides that were traced, where these are known numbers."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    strides = traced.stride()
    if value.stride() == strides or not all(isinstance(stride, int) for stride in strides):
        return value
    return with_strides(value, strides, own=True)


def _of_slots(module: fx.GraphModule, slots: Iterable[int], parameters: Collection[int] = ()) -> fx.GraphModule:
    """A copy that returns the gradients which exist, each said to be of a slot: a parameter's, or any other's."""
    pairs = [(value, slot) for value, slot in zip(outputs(module.graph), slots, strict=True) if value is not None]
    descriptors = [
        GradAOTOutput(ParamAOTInput(str(slot)) if slot in parameters else PlainAOTInput(slot))  # the passes tell them by kind
        for _, slot in pairs
    ]
    return build_graph(
        module,
        placeholders(module.graph),
        [node for node in module.graph.nodes if node.op not in ("placeholder", "output")],
        [value for value, _ in pairs],
        results_meta={"desc": descriptors},
    )


def _slot(of: Any) -> int:
    return int(of.target) if isinstance(of, ParamAOTInput) else int(of.idx)


def _partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
    refuse_draws(backward)
    return forward, backward


def _with_anchor(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.placeholder("anchor")
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _boxed(function: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], list[Any]]:
    """In AOTAutograd's calling convention: one list of arguments, which the callee empties."""

    def run(args: list[Any]) -> list[Any]:
        taken = list(args)
        args.clear()
        return list(function(taken))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _keep_backward_repeatable() -> None:
    """Say that the backward overwrites none of its inputs, which is so: else AOTAutograd refuses retain_graph."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _disable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of what is compiled already."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _compiler(mode: str | None, options: Mapping[str, Any]) -> Compiler:
    if mode is not None:
        raise InputError(f"torch.compile(mode={mode!r}): backend 'twobp' has no modes.")
    for name in options:
        if name not in _OPTIONS:
            raise InputError(f"backend 'twobp' has no option {name!r}. It has: {', '.join(map(repr, _OPTIONS))}.")
    compiler: Compiler = {**_OPTIONS, **options}["compiler"]
    return compiler


def _label(module: fx.GraphModule) -> str:
    """The first and the last module that ran, and Dynamo's number for the graph."""
    ran = [re.sub(r"^L\['\w+'\]\.?", "", fqn) for node in operations(module.graph) if (fqn := module_fqn(node))]
    number = f"graph {module.meta.get('dynamo_compile_id')}"
    return f"{number}: '{ran[0]}' to '{ran[-1]}'" if ran else number


def _name(node: fx.Node) -> str:
    """A parameter's name as its module's `named_parameters` has it, as far as Dynamo's source tells it."""
    argument = node.meta.get("grapharg")
    parts = re.findall(r"_(?:modules|parameters)\['([^']+)'\]", argument.source.name) if argument is not None else []
    return ".".join(parts) or node.name
