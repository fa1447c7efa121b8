"""Lower a captured model to stage programs: cut, then for each stage capture its joint graph, partition, un-fuse, split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .capture import Captured, CapturedStage, capture_stage
from .emit import Emitter
from .errors import InputError, SplitError
from .passes.accumulate_grads import buffer_like
from .passes.aot import (
    BufferAOTInput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    gradients,
)
from .passes.cut_stages import Source, SourceKind, StageGraph, cut_stages
from .passes.graph import (
    ancestors,
    describe,
    is_random,
    module_fqn,
    operations,
    output_descriptors,
    outputs,
    placeholders,
    storage_bytes,
    storage_owners,
    writer,
    written_arguments,
)
from .passes.partition_joint import partition_joint
from .passes.place_stage import place_stage
from .passes.split_backward import split_backward
from .passes.unfuse_backward import unfuse_backward
from .program import Role, Signature, StageGraphs, StageMemory, StageProgram, Value


def lower(
    captured: Captured,
    stages: int | Sequence[str],
    *,
    trainable: Mapping[str, bool],
    differentiable_inputs: frozenset[str],
    emitter: Emitter,
    devices: Sequence[torch.device] | None = None,
    gradient_dtypes: Mapping[str, torch.dtype] | None = None,
) -> tuple[StageProgram, ...]:
    """The stage programs of a captured model; nothing is compiled yet.

    stages: how many, or the module FQNs at which a new stage begins. trainable: parameter FQN -> requires_grad.
    differentiable_inputs: the positions (as text) of the flat inputs that want a gradient. devices: one a stage; the
    model was captured on the first. gradient_dtypes: of parameters whose gradients are summed up in another dtype than their own.
    Raises CutError, CaptureError, SplitError, InputError.
    """
    cut = cut_stages(captured.module, stages)
    _refuse_unsafe_writes(cut)
    programs: list[StageProgram] = []
    received: dict[str, torch.Tensor] = {}
    for stage in cut:
        if devices is not None:
            place_stage(stage.module, devices[0], devices[stage.index])
            received = {name: _elsewhere(value, devices[stage.index]) for name, value in received.items()}
        traced = capture_stage(
            stage,
            received,
            trainable=trainable,
            differentiable_inputs=differentiable_inputs,
            decompositions=emitter.decompositions,
        )
        received = {name: _boundary(traced.sent.get(name, received.get(name))) for name in stage.sends}
        differentiable = frozenset(name for name, value in received.items() if value.requires_grad)
        programs.append(lower_stage(stage, traced, differentiable, emitter, gradient_dtypes or {}))
    return tuple(programs)


def _boundary(value: torch.Tensor | None) -> torch.Tensor:
    """The fake tensor as the next stage meets it: a leaf."""
    if value is None:
        raise AssertionError("a stage sends what it neither computes nor receives")
    return value.detach().requires_grad_(value.requires_grad)


def _elsewhere(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The fake tensor as it arrives on another device: with the same strides."""
    with value.fake_mode:  # type: ignore[attr-defined]
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.requires_grad_(value.requires_grad)


def _refuse_unsafe_writes(cut: Iterable[StageGraph]) -> None:
    """Refuse writes in place into arguments and parameters, and into buffers that another stage reads."""
    readers: dict[str, set[int]] = {}
    writers: dict[str, tuple[int, fx.Node]] = {}
    for stage in cut:
        graph = stage.module.graph
        for node in placeholders(graph):
            if node.meta["source"].kind is SourceKind.BUFFER:
                readers.setdefault(node.meta["source"].key, set()).add(stage.index)
        owners = storage_owners(graph)
        for node in operations(graph):
            for owner in {owner for argument in written_arguments(node) for owner in owners[argument]}:
                source = owner.meta.get("source")
                if not isinstance(source, Source):
                    continue
                if source.kind is SourceKind.INPUT:
                    raise InputError(
                        f"{describe(writer(node))} writes in place into an argument of the model. Micro-batches are views of the "
                        "batch, so this would change the caller's tensors. Clone the argument first."
                    )
                if source.kind is SourceKind.PARAMETER:
                    raise InputError(
                        f"{describe(writer(node))} writes in place into parameter '{source.key}'. With several micro-batches on "
                        "their way, gradients would belong to different values of it. Change parameters between steps."
                    )
                if source.kind is SourceKind.BUFFER:
                    writers[source.key] = (stage.index, node)
    for key, (stage_index, node) in writers.items():
        if readers[key] != {stage_index}:
            raise InputError(
                f"Buffer '{key}' is written by stage {stage_index} ({describe(writer(node))}) "
                f"and read by stages {sorted(readers[key])}. With several micro-batches under way its value there would depend on "
                "timing. Cut so that one stage holds it."
            )


def _refuse_sparse_gradients(backward: fx.GraphModule) -> None:
    for node, of in gradients(backward.graph):
        if node.meta["val"].layout is not torch.strided:
            raise SplitError(
                f"{describe(node)} computes a sparse gradient ({of}), which cannot be summed over micro-batches yet. Use a dense "
                "one: for an embedding, sparse=False."
            )


def lower_stage(
    stage: StageGraph,
    traced: CapturedStage,
    differentiable: frozenset[str],
    emitter: Emitter,
    gradient_dtypes: Mapping[str, torch.dtype],
) -> StageProgram:
    """One stage's program from its joint graph. Passes in order: partition_joint, unfuse_backward, split_backward."""
    parts = partition_joint(traced.joint)
    _refuse_sparse_gradients(parts.backward)
    unfuse_backward(parts.backward)
    split = split_backward(parts.backward)
    graphs = StageGraphs(parts.forward, split.backward_input, split.backward_weight, parts.backward)
    naming = _Naming(stage, traced)
    stash = set(split.stash)
    signatures = {
        name: Signature(
            tuple(naming.taken(node, stash if name == "backward_weight" else ()) for node in placeholders(graph.graph)),
            tuple(naming.returned(graph.graph, Role.SAVED if name == "forward" else Role.STASH)),
        )
        for name, graph in graphs.items()
    }
    return StageProgram(
        index=stage.index,
        graphs=graphs,
        signatures=signatures,
        receives=stage.receives,
        sends=stage.sends,
        differentiable=differentiable,
        gradient_needs=_gradient_needs(parts.backward),
        memory=_memory(graphs, parts.saved, split.stash),
        draws=any(is_random(node) for node in operations(parts.forward.graph)),
        buffers=_buffers(graphs, naming, gradient_dtypes),
        modules=_module_range(stage),
        emitter=emitter,
    )


class _Naming:
    """Turns the nodes of a stage's graphs into the values of its calling convention, by descriptor."""

    def __init__(self, stage: StageGraph, traced: CapturedStage) -> None:
        self._computes = stage.computes
        self._sources = traced.sources
        self._inputs = traced.inputs

    def _source(self, descriptor: Any) -> Source:
        if isinstance(descriptor, (ParamAOTInput, BufferAOTInput)):
            return self._sources[descriptor.target]
        if isinstance(descriptor, PlainAOTInput):
            return self._inputs[descriptor.idx]
        raise AssertionError(f"no source for {descriptor}")

    def taken(self, node: fx.Node, stash: Iterable[str]) -> Value:
        descriptor = node.meta.get("desc")
        if node.name in stash:
            return _value(node, Role.STASH, node.name)
        if isinstance(descriptor, TangentAOTInput):
            output = descriptor.output
            if not isinstance(output, PlainAOTOutput):
                raise AssertionError(f"a tangent of {output}")
            return _value(node, Role.TANGENT, self._computes[output.idx])
        if isinstance(descriptor, (ParamAOTInput, BufferAOTInput, PlainAOTInput)):
            source = self._source(descriptor)
            return _value(node, Role(source.kind.value), source.key)
        return _value(node, Role.SAVED, node.name)

    def returned(self, graph: fx.Graph, for_later: Role) -> Iterable[Value]:
        for node, descriptor in zip(outputs(graph), output_descriptors(graph), strict=True):
            if isinstance(descriptor, InputMutationAOTOutput):
                yield _value(node, Role.BUFFER_UPDATE, self._source(descriptor.mutated_input).key)
            elif isinstance(descriptor, PlainAOTOutput):
                yield _value(node, Role.SENT, self._computes[descriptor.idx])
            elif descriptor is None:
                yield _value(node, for_later, node.name)
            else:
                source = self._source(descriptor.grad_of)
                yield _value(node, Role(f"{source.kind.value} gradient"), source.key)


def _value(node: fx.Node, role: Role, key: str) -> Value:
    tensor = node.meta["val"]
    return Value(node.name, role, key, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _buffers(graphs: StageGraphs, naming: _Naming, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    taken = [(naming.taken(node, ()), node.meta["val"]) for node in placeholders(graphs.forward.graph)]
    parameters = {value.key: fake for value, fake in taken if value.role is Role.PARAMETER}
    returned = naming.returned(graphs.backward.graph, Role.STASH)
    return {
        value.name: buffer_like(parameters[value.key], dtypes.get(value.key))
        for value in returned
        if value.role is Role.PARAMETER_GRADIENT
    }


def _gradient_needs(backward: fx.GraphModule) -> dict[str, frozenset[str]]:
    """For each gradient of B, by name, the tangents it is computed from."""
    return {
        value.name: frozenset(node.name for node in ancestors([value]) if isinstance(node.meta.get("desc"), TangentAOTInput))
        for value, _ in gradients(backward.graph)
    }


def _memory(graphs: StageGraphs, saved: Sequence[str], stash: Sequence[str]) -> StageMemory:
    forward = {node.name: node for node in graphs.forward.graph.nodes}
    state = [
        node for node in placeholders(graphs.forward.graph) if isinstance(node.meta.get("desc"), (ParamAOTInput, BufferAOTInput))
    ]
    kept = placeholders(graphs.backward_weight.graph)
    stashed = set(stash)
    saved_nodes = [forward[name] for name in saved]
    saved_and_kept = [forward[node.name] for node in kept if node.name not in stashed and node.name in forward]
    after_forward = storage_bytes(saved_nodes, besides=state)
    return StageMemory(
        saved=after_forward,
        freed_after_input=after_forward - storage_bytes(saved_and_kept, besides=state),
        held_for_weight=storage_bytes(kept, besides=state),
    )


def _module_range(stage: StageGraph) -> str:
    names = list(dict.fromkeys(fqn for node in operations(stage.module.graph) if (fqn := module_fqn(node))))
    if not names:
        return "no module"
    return f"module '{names[0]}'" if len(names) == 1 else f"modules '{names[0]}' to '{names[-1]}'"
