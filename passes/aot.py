"""The parts of torch's private AOTAutograd that the passes use, in one place: descriptors and the partitioner.

A new torch release breaks here or nowhere.
"""

from __future__ import annotations

from typing import Any

from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SyntheticBaseAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)

from .graph import output_descriptors, output_node, outputs

__all__ = [
    "BASES",
    "TOKENS",
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "forward_output_count",
    "min_cut_partition",
]

BASES = (SyntheticBaseAOTInput, ViewBaseAOTInput)
"""Descriptors of a tensor that stands for several inputs, which are views of it."""

TOKENS = (ForwardTokenAOTInput, ForwardTokenAOTOutput)
"""Descriptors of the tokens that keep effects in order. Autograd does not see them."""


def forward_output_count(joint: fx.Graph) -> int:
    """How many of a joint graph's outputs belong to the forward: those before the first gradient.

    A gradient that does not exist has no descriptor at all.
    """
    descriptors = output_descriptors(joint)
    for i, descriptor in enumerate(descriptors):
        if descriptor is None or isinstance(descriptor, GradAOTOutput):
            return i
    return len(descriptors)


def min_cut_partition(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's min-cut rematerialization: F and B. Works on a copy; the outputs of F are the joint's, then what it saves."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {})).meta = dict(output_node(joint.graph).meta)
    working = fx.GraphModule(joint, graph)
    result: Any = min_cut_rematerialization_partition(working, None, num_fwd_outputs=forward_output_count(joint.graph))
    forward, backward = result
    return forward, backward


def gradients(backward: fx.Graph) -> list[tuple[fx.Node, Any]]:
    """The gradients a backward graph returns, each with the descriptor of what it is the gradient of."""
    pairs = zip(outputs(backward), output_descriptors(backward), strict=True)
    return [(value, descriptor.grad_of) for value, descriptor in pairs]
