"""Split a stage's backward graph B into I (the gradients of its inputs) and W (the gradients of its parameters).

In:  B, whose placeholders are saved values and tangents, and whose outputs carry descriptors saying whose gradient each is.
Out: `BackwardSplit`. I is everything an input's gradient needs; W is the rest. What W reads of I is the stash, and W takes it as
     placeholders of the same names.
Never: runs a node twice, drops one that has an effect, or changes a value: I then W is B in another order.

    B:  g1 = relu_backward(t, h);  dx = g1 @ w.T;  dw = x.T @ g1;  return dx, dw
    I:  g1 = relu_backward(t, h);  dx = g1 @ w.T;  return dx | g1        (stash: g1)
    W:  dw = x.T @ g1;             return dw

An output that is a placeholder needs no node at all; a gradient that I needs anyway (or that a fused operator computes along with
an input's) is computed in I, stashed, and handed out by W. Without input gradients everything runs in W; without parameter
gradients W is empty. This is the p1/p2 split of 2BP (arXiv 2405.18047), by reachability.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .aot import GradAOTOutput, ParamAOTInput, gradients
from .errors import SplitError
from .graph import ancestors, build_graph, describe, has_effect, operations, placeholders, storage_owners, written_arguments


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """I and W of one stage.

    backward_input:  takes the placeholders of B it reads; returns the input gradients of `input_gradients`, then the stash.
    backward_weight: takes the placeholders of B it reads, then the stash; returns those of `parameter_gradients`.
    """

    backward_input: fx.GraphModule
    backward_weight: fx.GraphModule
    stash: tuple[str, ...]


def split_backward(backward: fx.GraphModule) -> BackwardSplit:
    """Split B, which is not changed.

    Raises SplitError if a node writes in place into a value that both halves read.
    """
    graph = backward.graph
    every = gradients(graph)
    of_inputs = [(value, of) for value, of in every if not isinstance(of, ParamAOTInput)]
    of_parameters = [(value, of) for value, of in every if isinstance(of, ParamAOTInput)]
    effects = [node for node in operations(graph) if has_effect(node)]

    # Where nothing asks for an input's gradient, effects go with W: I is empty.
    in_input = ancestors([*(value for value, _ in of_inputs), *effects]) if of_inputs else set()
    wanted = in_input | ancestors([*(value for value, _ in of_parameters), *effects])
    for node in operations(graph):
        # The parts of a tuple that I computes are taken out in I: a tuple is no value that can be stashed.
        if node in wanted and node.target is operator.getitem and node.args[0] in in_input:
            in_input.add(node)
    moved = [node for node in operations(graph) if node in wanted and node not in in_input]
    read_by_weight = {argument for node in moved for argument in node.all_input_nodes}
    read_by_weight |= {value for value, _ in of_parameters}
    stash = [node for node in operations(graph) if node in in_input and node in read_by_weight]
    if of_inputs:
        _refuse_shared_writes(graph, effects, moved)

    sizes = {
        node for node in placeholders(graph) if isinstance(node.meta.get("val"), torch.SymInt)
    }  # both halves may speak of them
    backward_input = build_graph(
        backward,
        [node for node in placeholders(graph) if node in in_input | sizes],
        [node for node in graph.nodes if node in in_input and node.op not in ("placeholder", "output")],
        [*(value for value, _ in of_inputs), *stash],
        results_meta={"desc": [*(GradAOTOutput(of) for _, of in of_inputs), *([None] * len(stash))]},
    )
    backward_weight = build_graph(
        backward,
        [*(node for node in placeholders(graph) if node in read_by_weight | sizes), *stash],
        [*(node for node in graph.find_nodes(op="get_attr") if node in read_by_weight), *moved],
        [value for value, _ in of_parameters],
        results_meta={"desc": [GradAOTOutput(of) for _, of in of_parameters]},
    )
    _check_covers(wanted, backward_input, backward_weight)
    return BackwardSplit(backward_input, backward_weight, tuple(node.name for node in stash))


def _refuse_shared_writes(graph: fx.Graph, effects: Iterable[fx.Node], moved: Iterable[fx.Node]) -> None:
    """What W reads before the write in B, it would read after it: I runs first."""
    owners = storage_owners(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in effects:
        read_before = {a for reader in moved if position[reader] < position[node] for a in reader.all_input_nodes}
        for argument in written_arguments(node):
            if any(owners[argument] & owners[value] for value in read_before):
                raise SplitError(
                    f"{describe(node)} writes in place into {argument.name}, which the weight gradients still read. Use an "
                    "operation that returns a new tensor, or run this model with split_backward=False."
                )


def _check_covers(wanted: set[fx.Node], backward_input: fx.GraphModule, backward_weight: fx.GraphModule) -> None:
    """Each node of B whose value somebody wants runs in exactly one half."""
    first = {node.name for node in operations(backward_input.graph)}
    second = {node.name for node in operations(backward_weight.graph)}
    if both := first & second:
        raise AssertionError(f"in both halves of the backward: {sorted(both)}")
    names = {node.name for node in wanted if node.op not in ("placeholder", "get_attr", "output")}
    if lost := names - first - second:
        raise AssertionError(f"in neither half of the backward: {sorted(lost)}")
