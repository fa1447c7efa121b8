"""Partition a stage's joint graph into F and B, by torch's min-cut partitioner.

In:  the joint forward-backward graph from AOTAutograd, a descriptor on every input and output.
Out: `ForwardBackward`: F returns what the joint's forward returns, then the values it saves that it computed itself; B takes the
     saved values (some of them F's own inputs, which F need not return) and the tangents, and returns the gradients.
Never: draws random numbers in B (a recomputed draw would be another draw), or saves a buffer that F's caller will overwrite.

Every value has one name throughout: a placeholder of B is called what the node of F that computes it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .aot import GradAOTOutput, InputMutationAOTOutput, PlainAOTOutput, TangentAOTInput, forward_output_count, min_cut_partition
from .errors import SplitError
from .graph import (
    build_graph,
    describe,
    is_random,
    operations,
    output_descriptors,
    output_node,
    outputs,
    placeholders,
    storage_owners,
)

RECOMPUTED = "recomputed"
"""Key in `node.meta` of B, I and W: this node was computed by F too, and is computed again rather than saved."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """F and B of one stage. `saved`: the names of the values B takes from F, whether F computes or receives them.

    B's outputs are the gradients that exist; a parameter that gets none is not among them.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]


def partition_joint(joint: fx.GraphModule) -> ForwardBackward:
    """Partition `joint` (which is not changed) into F and B.

    Raises SplitError if B would draw random numbers, naming the node.
    """
    results = outputs(joint.graph)
    descriptors = output_descriptors(joint.graph)
    _refuse_effects(joint, descriptors)
    returned = forward_output_count(joint.graph)
    if all(gradient is None for gradient in results[returned:]):
        return _without_backward(joint, results[:returned], descriptors[:returned])
    forward, backward = min_cut_partition(joint)
    refuse_draws(backward)
    _drop_missing_gradients(backward)
    copy_overwritten(forward, backward, descriptors[:returned])
    return _own_what_it_saves(forward, backward, descriptors[:returned])


def refuse_draws(backward: fx.GraphModule) -> None:
    """Raise SplitError if B draws random numbers, naming the node: what F drew must be saved."""
    for node in operations(backward.graph):
        if is_random(node):
            raise SplitError(
                f"The backward would draw random numbers again: {describe(node)}. The forward's draw must be saved, not "
                "recomputed: set torch._functorch.config.activation_memory_budget back to 1, or move the random operation "
                "out of the checkpointed region."
            )


def _refuse_effects(joint: fx.GraphModule, descriptors: Sequence[Any]) -> None:
    known = (PlainAOTOutput, InputMutationAOTOutput, GradAOTOutput)
    for descriptor in descriptors:
        if descriptor is not None and not isinstance(descriptor, known):
            ordered = [node for node in operations(joint.graph) if str(node.target) == "with_effects"]
            where = "; ".join(f"{node.args[1]}: {describe(node)}" for node in ordered[:3]) or str(descriptor)
            raise SplitError(
                f"The model runs an operator whose effect torch keeps in order by a token ({where}). It cannot be moved between "
                "the halves of a backward. Use a form without the effect: for checked linear algebra the '_ex' one, as in "
                "torch.linalg.inv_ex."
            )


def _without_backward(joint: fx.GraphModule, results: Sequence[fx.Node | None], descriptors: Sequence[Any]) -> ForwardBackward:
    """F alone: no gradient is asked of this stage."""
    inputs = [n for n in placeholders(joint.graph) if not isinstance(n.meta.get("desc"), TangentAOTInput)]
    nodes = [n for n in joint.graph.nodes if n.op not in ("placeholder", "output")]
    forward = build_graph(joint, inputs, nodes, results, results_meta={"desc": list(descriptors)})
    forward.graph.eliminate_dead_code()
    forward.recompile()
    return ForwardBackward(forward, build_graph(joint, [], [], [], results_meta={"desc": []}), ())


def _drop_missing_gradients(backward: fx.GraphModule) -> None:
    out = output_node(backward.graph)
    pairs = [(v, d) for v, d in zip(outputs(backward.graph), out.meta["desc"], strict=True) if v is not None]
    out.args = (tuple(value for value, _ in pairs),)
    out.meta = {"desc": [descriptor for _, descriptor in pairs]}
    backward.recompile()


def copy_overwritten(forward: fx.GraphModule, backward: fx.GraphModule, descriptors: Sequence[Any]) -> None:
    """Let F save a copy of every input that its caller overwrites afterwards; changes both graphs.

    `descriptors`: of F's first outputs, those that are no saved values. What F computes from such an input, views of it too, it
    computes from the copy; B takes the copy under the copy's name.
    """
    overwritten = {d.mutated_input for d in descriptors if isinstance(d, InputMutationAOTOutput)}
    saved = {node for node in outputs(forward.graph)[len(descriptors) :] if isinstance(node, fx.Node)}
    inputs = placeholders(forward.graph)
    owners = storage_owners(forward.graph)
    taken = {node.name: node for node in placeholders(backward.graph)}
    for each in inputs:
        if each.meta.get("desc") not in overwritten or not any(each in owners[node] for node in saved):
            continue
        users = list(each.users)
        with forward.graph.inserting_after(inputs[-1]):
            copy = forward.graph.call_function(torch.ops.aten.clone.default, (each,))
        copy.name = _unused_name(f"{each.name}_before", forward.graph, backward.graph)
        copy.meta = {"val": each.meta["val"].clone()}
        for user in users:
            user.replace_input_with(each, copy)
        if (reader := taken.get(each.name)) is not None:
            reader.name = reader.target = copy.name
    forward.graph.lint()
    forward.recompile()
    backward.recompile()


def _unused_name(name: str, *graphs: fx.Graph) -> str:
    used = {node.name for graph in graphs for node in graph.nodes}
    while name in used:
        name += "_"
    return name


def _own_what_it_saves(forward: fx.GraphModule, backward: fx.GraphModule, descriptors: Sequence[Any]) -> ForwardBackward:
    """Drop from F's outputs the saved values that are F's own inputs."""
    taken = {node.name for node in placeholders(backward.graph)}
    results, returned = outputs(forward.graph), len(descriptors)
    saved = list(dict.fromkeys(node for node in results[returned:] if isinstance(node, fx.Node) and node.name in taken))
    computed = [node for node in saved if node.op != "placeholder"]
    out = output_node(forward.graph)
    out.args = ((*results[:returned], *computed),)
    out.meta = {"desc": [*descriptors, *([None] * len(computed))]}
    forward.graph.lint()
    forward.recompile()

    computed_by_forward = {node.name for node in operations(forward.graph)}
    for node in operations(backward.graph):
        if node.name in computed_by_forward:
            node.meta[RECOMPUTED] = True
    backward.recompile()
    return ForwardBackward(forward, backward, tuple(node.name for node in saved))
