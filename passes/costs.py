"""What a node costs: floating-point operations by torch's own formulas, and bytes moved.

Source of the formulas: `torch.utils.flop_counter`. A multiply and an add count as two operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .graph import aliased_arguments, bodies, operations, value_bytes

FLOPS_PER_BYTE = 16
"""How many floating-point operations take as long as moving one byte. A core of a server CPU does 50 to 150 GFLOP/s and moves
5 to 10 GB/s; an accelerator's ratio is higher, but there the matrix products of a large model dominate whatever is chosen."""


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> int:
    return int(
        sdpa_flop_count(  # type: ignore[no-untyped-call]
            query.shape, key.shape, value.shape
        )
    )


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    return int(
        sdpa_backward_flop_count(  # type: ignore[no-untyped-call]
            gradient.shape, query.shape, key.shape, value.shape
        )
    )


_FORMULAS = {
    **flop_registry,
    # The CPU's fused attention, which torch's registry leaves out; counted as its siblings on other devices are.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class _CountFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what composite operators decompose into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := _FORMULAS.get(func.overloadpacket)) is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one node; 0 for what torch has no formula for (elementwise operations, views)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return sum(total_flops(operations(body.graph)) for body in bodies(node))
    formula = _FORMULAS.get(node.target.overloadpacket)
    composite = node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if formula is None and not composite:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: argument.meta.get("val"))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    # A composite operator (linear, matmul, conv2d): count what it decomposes into, on fake tensors.
    with torch.no_grad(), _CountFlops() as counter:
        node.target(*args, **kwargs)
    total: int = counter.total
    return total


def node_bytes(node: fx.Node) -> int:
    """Bytes the node reads and writes; 0 for views, which move nothing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return sum(node_bytes(each) for body in bodies(node) for each in operations(body.graph))
    if not node.target._schema.is_mutable and aliased_arguments(node):
        return 0
    return sum(value_bytes(argument.meta.get("val")) for argument in node.all_input_nodes) + value_bytes(node.meta.get("val"))


def node_cost(node: fx.Node) -> int:
    """One number to balance stages by: floating-point operations plus bytes moved at `FLOPS_PER_BYTE`."""
    return node_flops(node) + FLOPS_PER_BYTE * node_bytes(node)


def total_flops(nodes: Iterable[fx.Node]) -> int:
    """Floating-point operations of all `nodes`."""
    return sum(node_flops(node) for node in nodes)
