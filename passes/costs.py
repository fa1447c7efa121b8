"""What a node costs: floating-point operations by torch's own formulas, and bytes moved.

Source of the formulas: `torch.utils.flop_counter`. A multiply and an add count as two operations.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .graph import aliased_arguments, value_bytes

FLOPS_PER_BYTE = 16
"""How many floating-point operations take as long as moving one byte. A core of a server CPU does 50 to 150 GFLOP/s and moves
5 to 10 GB/s; an accelerator's ratio is higher, but there the matrix products of a large model dominate whatever is chosen."""


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one node; 0 for what torch has no formula for (elementwise operations, views)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None and not node.target.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: argument.meta.get("val"))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    # A composite operator (linear, matmul, conv2d): count what it decomposes into, on fake tensors.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)
    return int(counter.get_total_flops())


def node_bytes(node: fx.Node) -> int:
    """Bytes the node reads and writes; 0 for views, which move nothing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    if not node.target._schema.is_mutable and aliased_arguments(node):
        return 0
    return sum(value_bytes(argument.meta.get("val")) for argument in node.all_input_nodes) + value_bytes(
        node.meta.get("val")
    )


def node_cost(node: fx.Node) -> int:
    """One number to balance stages by: floating-point operations plus bytes moved at `FLOPS_PER_BYTE`."""
    return node_flops(node) + FLOPS_PER_BYTE * node_bytes(node)


def total_flops(nodes: Iterable[fx.Node]) -> int:
    """Floating-point operations of all `nodes`."""
    return sum(node_flops(node) for node in nodes)
