"""Un-fuse backward operators that compute an input's and a parameter's gradient together, where that is free.

In and out: a backward graph. Never: changes a value (each half is the same kernel with part of its output mask).

    dx, dw, db = convolution_backward(g, x, w, ..., [True, True, True])
    ->  dx, _, _ = convolution_backward(g, x, w, ..., [True, False, False])
        _, dw, db = convolution_backward(g, x, w, ..., [False, True, True])

Afterwards the weight half depends on nothing but saved values and the incoming gradient, and `split_backward` can move it to W.
Measured (CPU, torch 2.13): the two halves of a convolution cost what the fused call costs and are bitwise equal. Layer norm's
halves cost 1.3 times the fused call and batch norm's 1.4 times: they stay whole, in I.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .graph import operations

_CONVOLUTION = torch.ops.aten.convolution_backward.default
INPUT_MASK, PARAMETER_MASK = (True, False, False), (False, True, True)


def unfuse_backward(module: fx.GraphModule) -> bool:
    """Un-fuse in place; says whether anything changed."""
    changed = False
    for node in operations(module.graph):
        if node.target is _CONVOLUTION:
            changed |= _unfuse_convolution(module.graph, node)
    if changed:
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return changed


def _unfuse_convolution(graph: fx.Graph, node: fx.Node) -> bool:
    mask = node.args[-1]
    readers = list(node.users)
    if not isinstance(mask, (list, tuple)) or any(user.target is not operator.getitem for user in readers):
        return False
    wanted = {
        position
        for position, asked in enumerate(mask)
        if asked and any(user.args[1] == position and user.users for user in readers)
    }
    if 0 not in wanted or not wanted & {1, 2}:
        return False
    for half, positions in ((INPUT_MASK, {0}), (PARAMETER_MASK, {1, 2})):
        with graph.inserting_before(node):
            part = graph.call_function(_CONVOLUTION, (*node.args[:-1], [bool(m and h) for m, h in zip(mask, half, strict=True)]))
        part.meta = dict(node.meta)
        part.meta["val"] = tuple(v if h else None for v, h in zip(node.meta["val"], half, strict=True))
        for user in readers:
            if user.args[1] in positions:
                user.replace_input_with(node, part)
    return True
