"""`torch.compile(module, backend="twobp")`: Dynamo's graphs, compiled with a backward that comes in two halves when asked.

Dynamo captures, AOTAutograd traces the joint graph and runs it (aliases, mutations, symbolic sizes, saved tensors: its business),
and the passes split its backward. A plain backward runs B whole; under `defer_weight_grads` I runs and W waits.
"""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch.autograd.graph import Node

from .deferral import Deferral, WeightGradients, arrivals, leaf_of, new_anchor, note_arrivals, running_node, storages
from .emit import Compiled, Compiler, Emitter, emitter
from .errors import InputError
from .passes.accumulate_grads import accumulate_grads, buffer_like
from .passes.aot import BASES, TOKENS, GradAOTOutput, ParamAOTInput, PlainAOTInput, TangentAOTInput, gradients
from .passes.graph import (
    ancestors,
    build_graph,
    describe,
    is_symbolic,
    module_fqn,
    operations,
    output_descriptors,
    output_node,
    outputs,
    placeholders,
)
from .passes.partition_joint import copy_overwritten, refuse_draws
from .passes.split_backward import split_backward
from .passes.unfuse_backward import unfuse_backward
from .runtime.gradients import new_buffer
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

    function: takes the graph's inputs and returns its outputs, differentiable by autograd. AOTAutograd may hand them on in another
    way: inputs that share storage as their common base. Its node in autograd's graph has a slot for each tensor that it hands on.
    parameters: the slots of parameters, with their names; none if the backward is not split: where a slot stands for several
    tensors (a tensor subclass), or the backward has effects. positions: of what each slot stands for, among the gradients that the
    backward returns. returns: descriptors of the node's outputs. names: of the graph's inputs, the anchor first.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], emit: Emitter) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self._emitter = emit
        self._anchor = new_anchor(self)
        self.label = _label(module)
        self.deferred: dict[Node | None, Deferral] = {}
        self.names = ["anchor", *_names(placeholders(module.graph))]
        self.parameters: dict[int, str] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.positions: list[int] = []
        self.returns: list[Any] = []
        self._splits = False
        takes = [self._anchor, *example_inputs]
        self._trainable = {
            position for position, each in enumerate(takes) if isinstance(each, torch.nn.Parameter) and each.requires_grad
        }
        self._compiled = aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=self._compile_backward,
            partition_fn=self._partition,
            decompositions=dict(emit.decompositions),
        )(_with_anchor(module), takes)
        self.function = _disable(self._call)

    def _call(self, *args: Any) -> Any:
        results = self._compiled(self._anchor, *args)
        for node in {self._node_behind(each) for each in results if isinstance(each, torch.Tensor)}:
            if node is not None:
                node.register_prehook(note_arrivals)
        return results

    def _node_behind(self, result: torch.Tensor) -> Node | None:
        """The node of the call that gave this result, if it is one of the node's outputs or a view of one."""
        node = result.grad_fn
        while node is not None and not any(leaf_of(following) is self._anchor for following, _ in node.next_functions):
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        return node

    def _partition(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        descriptors = output_descriptors(joint.graph)[: options["num_fwd_outputs"]]
        self.returns = [each for each in descriptors if not isinstance(each, TOKENS)]
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
        refuse_draws(backward)
        copy_overwritten(forward, backward, descriptors)
        takes = [node.meta.get("desc") for node in placeholders(forward.graph)]
        handed_on = [each for each in takes if not isinstance(each, TOKENS)]
        self._splits = len(outputs(backward.graph)) == len(handed_on) and all(
            isinstance(each, (PlainAOTInput, *BASES)) for each in handed_on
        )
        return forward, backward

    def _compile_forward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _keep_backward_repeatable()
        handed_on = [node for node in placeholders(module.graph) if not isinstance(node.meta.get("desc"), TOKENS)]
        self.positions = [i for i, node in enumerate(handed_on) if isinstance(node.meta["val"], torch.Tensor)]
        for slot, position in enumerate(self.positions):
            of = handed_on[position].meta.get("desc")
            if self._splits and isinstance(of, PlainAOTInput) and of.idx in self._trainable:
                self.parameters[slot] = self.names[of.idx]
                self.buffers[slot] = buffer_like(handed_on[position].meta["val"])
        return _boxed(self._emitter.emit(module, f"{self.label}, forward"))

    def _compile_backward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not self._splits:
            return _boxed(self._emitter.emit(module, f"{self.label}, backward"))
        for node, example in zip(placeholders(module.graph), example_inputs, strict=True):
            node.meta["val"] = example  # with the strides that the compiled forward really gives
        return _boxed(_Backward(self, module, self._emitter))


class _Backward:
    """B of one graph; and its halves, made when first asked for."""

    def __init__(self, graph: CompiledGraph, module: fx.GraphModule, emit: Emitter) -> None:
        self._graph = graph
        self._emitter = emit
        self._takes = tuple(node.name for node in placeholders(module.graph))
        self._returns = len(outputs(module.graph))
        slots = {position: slot for slot, position in enumerate(graph.positions)}
        self._module = _of_slots(module, [slots.get(position, -1) for position in range(self._returns)])
        unfuse_backward(self._module)
        self._needs = {_slot(of): self._tangents(value) for value, of in gradients(self._module.graph)}
        self._whole: _Part | None = None
        self._halves: dict[frozenset[int], tuple[_Part, _Weights]] = {}
        self._lock = threading.Lock()  # a backward may run in any thread
        self._symbolic = any(is_symbolic(node.meta["val"]) for node in placeholders(module.graph))
        if self._symbolic:  # what a compiler assumes of the sizes is guarded only while Dynamo is at it
            self._compiled_whole()
            self._compiled_halves(frozenset())

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradients of all that the graph takes; None for what has none, and for what is put off."""
        values = dict(zip(self._takes, args, strict=True))
        node = running_node()
        deferral = self._graph.deferred.get(node)
        missing = self._missing(arrivals(node))
        if deferral is None or not deferral.parameters or (deferral.kept and self._symbolic):
            whole = self._compiled_whole()
            gradients = dict(zip(map(_slot, whole.gradients_of), whole(whole.pick(values)), strict=True))
            if deferral is not None:  # computed already, for want of halves compiled for this: to accumulate them can wait
                later = {slot: gradients.pop(slot) for slot in deferral.parameters if slot in gradients.keys() - missing}
                held = [(self._graph.parameters[slot], gradient) for slot, gradient in later.items()]
                self._put_off(deferral, list(later), missing, held)
        else:
            first, second = self._compiled_halves(frozenset(deferral.kept))
            gradients = {}
            for name, of, result in zip(first.returns, first.gradients_of, first(first.pick(values)), strict=True):
                if of is None:
                    values[name] = result
                else:
                    gradients[_slot(of)] = result
            held = list(zip(map(self._described, second.holds), (values[node.name] for node in second.holds), strict=True))
            self._own_leaves_gradients(gradients, held, node)
            self._put_off(deferral, second.slots, missing, held, second)
        results: list[torch.Tensor | None] = [None] * self._returns
        for slot in gradients.keys() - missing:
            results[self._graph.positions[slot]] = gradients[slot]
        return results

    def _own_leaves_gradients(self, gradients: dict[int, torch.Tensor], held: Sequence[tuple[str, Any]], node: Node | None) -> None:
        """Copy an input's gradient that would be its `.grad`, to be added to in place, while W reads the same storage."""
        read = storages(value for _, value in held)
        for slot, gradient in gradients.items():
            shared = storages([gradient]).keys() & read.keys()
            if shared and node is not None and leaf_of(node.next_functions[slot][0]) is not None:
                gradients[slot] = gradient.clone()

    def _tangents(self, gradient: fx.Node) -> frozenset[int]:
        """Which of the forward's outputs a gradient is computed from the gradients of. As autograd has it, it is None if none
        of these arrives; AOTAutograd puts zeros for them.
        """
        of = [node.meta.get("desc") for node in ancestors([gradient])]
        tangents = [desc.output for desc in of if isinstance(desc, TangentAOTInput)]
        return frozenset(self._graph.returns.index(output) for output in tangents if output in self._graph.returns)

    def _missing(self, arrived: Sequence[bool] | None) -> set[int]:
        """The slots that get no gradient, as far as it is known which of the forward's outputs got one."""
        if arrived is None or len(arrived) != len(self._graph.returns):
            return set()
        return {slot for slot, needs in self._needs.items() if needs and not any(arrived[i] for i in needs)}

    def _put_off(
        self,
        deferral: Deferral,
        slots: Sequence[int],
        missing: Collection[int],
        held: Sequence[tuple[str, Any]],
        weights: _Weights | None = None,
    ) -> None:
        """Leave W, which computes the gradients of `slots` from what it holds; those of the `missing` slots are zeros.

        Without W they are computed already, and are what is held.
        """
        wanted = [slot for slot in slots if slot in deferral.parameters and slot not in missing]
        buffers = weights.buffers if weights is not None else {}

        def run(values: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if weights is None:
                computed = dict(zip(slots, values, strict=True))
            else:
                into = dict(zip([slot for slot in wanted if slot in buffers], given, strict=True))
                computed = weights(values, into)
            return [computed[slot] for slot in wanted if slot not in buffers]

        names = self._graph.parameters
        deferral.pending.add(
            WeightGradients(
                self._graph.label,
                {names[slot]: deferral.parameters[slot] for slot in wanted},
                {names[slot]: why for slot, why in deferral.kept.items()},
                held,
                [buffers.get(slot) for slot in wanted],
                run,
            )
        )

    def _described(self, node: fx.Node) -> str:
        """What W takes, for people: inputs by their own names."""
        of = node.meta.get("desc")
        if isinstance(of, TangentAOTInput) and of.output in self._graph.returns:
            return f"the gradient of output {self._graph.returns.index(of.output)}"
        return self._graph.names[of.idx] if isinstance(of, PlainAOTInput) else describe(node)

    def _compiled_whole(self) -> _Part:
        with self._lock:
            if self._whole is None:
                self._whole = _Part(self._module, self._emitter, f"{self._graph.label}, backward")
            return self._whole

    def _compiled_halves(self, kept: frozenset[int]) -> tuple[_Part, _Weights]:
        """I and W, where the parameters of the `kept` slots count as inputs."""
        with self._lock:
            if kept not in self._halves:
                every = [_slot(of) for _, of in gradients(self._module.graph)]
                split = split_backward(_of_slots(self._module, every, self._graph.parameters.keys() - kept))
                self._halves[kept] = (
                    _Part(split.backward_input, self._emitter, f"{self._graph.label}, backward_input"),
                    _Weights(split.backward_weight, self._graph.buffers, self._emitter, f"{self._graph.label}, backward_weight"),
                )
            return self._halves[kept]


class _Part:
    """A compiled graph, what it takes, and the names of what it returns. Tensors reach it with the strides it was compiled for."""

    def __init__(self, module: fx.GraphModule, emit: Emitter, label: str) -> None:
        self.takes = placeholders(module.graph)
        self.returns = tuple(node.name if isinstance(node, fx.Node) else "" for node in outputs(module.graph))
        self.gradients_of = tuple(
            descriptor.grad_of if isinstance(descriptor, GradAOTOutput) else None
            for descriptor in output_node(module.graph).meta.get("desc", ())
        )
        self._function: Compiled = emit.emit(module, label)

    def pick(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[node.name] for node in self.takes]

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return self._function([_conform(arg, node.meta["val"]) for arg, node in zip(args, self.takes, strict=True)])


class _Weights:
    """W, compiled to add the gradients of parameters into buffers; sparse ones it returns.

    slots: of all these parameters. buffers: by slot, fake tensors laid out as the buffers. holds: what else it takes.
    """

    def __init__(self, module: fx.GraphModule, layouts: Mapping[int, torch.Tensor], emit: Emitter, label: str) -> None:
        every = gradients(module.graph)
        self.slots = [_slot(of) for _, of in every]
        self.buffers = {_slot(of): layouts[_slot(of)] for value, of in every if value.meta["val"].layout is torch.strided}
        self.holds = placeholders(module.graph)
        buffers = [self.buffers.get(slot) for slot in self.slots]
        self._part = _Part(accumulate_grads(module, buffers, whole=emit.keeps_order), emit, label)

    def __call__(self, held: Sequence[Any], into: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Add gradients to these buffers, by slot; the others are lost. Returns the sparse ones."""
        every = [into[slot] if slot in into else new_buffer(like) for slot, like in self.buffers.items()]
        return dict(zip(map(_slot, self._part.gradients_of), self._part([*held, *every]), strict=True))


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


def _names(nodes: Sequence[fx.Node]) -> list[str]:
    """The names of a graph's inputs: a parameter's as its module's `named_parameters` has it, as far as Dynamo's source tells it.

    Names that several modules of one graph have in common are given with where Dynamo found each.
    """
    sources = [argument.source.name if (argument := node.meta.get("grapharg")) is not None else "" for node in nodes]
    parts = [re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", source) for source in sources]
    locals_ = [re.sub(r"^L\['(\w+)'\]", r"\1", source) for source in sources]
    names = [".".join(part) or local or node.name for part, local, node in zip(parts, locals_, nodes, strict=True)]
    often = collections.Counter(names)
    return [source if often[name] > 1 else name for name, source in zip(names, sources, strict=True)]
