"""Add parameter gradients into buffers inside the backward graph, so that no separate pass over them is left.

In:  W, or any backward graph, whose outputs carry descriptors saying whose gradient each is.
Out: a graph that takes, after the placeholders of `backward`, one buffer a parameter gradient, in their order; adds each gradient
     to its buffer, in the buffer's dtype; and returns the rest: what is no parameter's gradient, or a sparse one.
Never: reads a buffer but to add to it, or computes anything else than before: only the order in which a sum is taken changes.

    W:    dw = mm(g.t(), x);            db = sum(g, 0);            return dw, db
    ->    addmm_(to_w, g.t(), x);       add_(to_b, sum(g, 0));     return

Where a gradient ends in a matrix product, the product goes straight into the buffer (`addmm(out=)`; on the CPU 0.43 to 0.85 of the
time of `mm` then `add_`). Views between the two are undone on the buffer: it is a view of the buffer that is written. The terms of
a sum are added one by one, and what is scattered into zeros is scattered into the buffer. All else is one `add_`, which a compiler
fuses with what computes the gradient. Where sums are to be autograd's bit by bit, each gradient is added as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .aot import ParamAOTInput
from .graph import build_graph, output_descriptors, output_node, outputs, placeholders
from .ops import addmm_, baddbmm_

_aten = torch.ops.aten
_PRODUCTS: dict[Any, Any] = {_aten.mm.default: addmm_, _aten.bmm.default: baddbmm_}
_COPIES = (_aten.clone.default, _aten.alias.default, _aten.detach.default)
_PERMUTATIONS = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.squeeze.dim, _aten.unsqueeze.default)
_SCATTERS = (_aten.index_put.default, _aten._unsafe_index_put.default)
_MASKED_SCATTER = _aten._unsafe_masked_index_put_accumulate.default


def accumulate_grads(backward: fx.GraphModule, buffers: Sequence[torch.Tensor | None], *, whole: bool = False) -> fx.GraphModule:
    """`backward`, which is not changed, with its parameter gradients added into buffers.

    buffers: for each parameter gradient, in order, a fake tensor with the shape, strides and dtype of the buffer to be given; None
    for one that is to be returned as it is. whole: add each gradient as a whole, as autograd does; else its parts as they come,
    which changes the order in which a sum is taken.
    """
    descriptors = output_descriptors(backward.graph)
    module = build_graph(
        backward,
        placeholders(backward.graph),
        [node for node in backward.graph.nodes if node.op not in ("placeholder", "output")],
        outputs(backward.graph),
    )
    graph = module.graph
    waiting = iter(buffers)
    results = [
        (value, descriptor, next(waiting) if _of_parameter(descriptor) else None)
        for value, descriptor in zip(outputs(graph), descriptors, strict=True)
    ]
    out = output_node(graph)
    out.args = (tuple(value for value, _, buffer in results if buffer is None),)
    out.meta = {"desc": [descriptor for _, descriptor, buffer in results if buffer is None]}
    to_add = [(value, _take(graph, f"{value.name}_buffer", buffer)) for value, _, buffer in results if buffer is not None]
    wanted = Counter(value for value, _ in to_add)
    for value, buffer in to_add:
        if wanted[value] == 1 and not whole:
            _add(value, buffer)
        else:  # also where one value is the gradient of two parameters
            _insert(_aten.add_.Tensor, (buffer, value), value)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def buffer_like(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialized buffer, laid out as autograd wants `.grad`: with the parameter's strides if these are dense, else row-major.

    On the parameter's device; fake if the parameter is. dtype: the parameter's if not given.
    """
    buffer = torch.empty_like(parameter, dtype=dtype)
    if buffer.stride() == parameter.stride():
        return buffer
    return torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)


def _of_parameter(descriptor: Any) -> bool:
    return descriptor is not None and isinstance(descriptor.grad_of, ParamAOTInput)


def _take(graph: fx.Graph, name: str, buffer: torch.Tensor) -> fx.Node:
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        node = graph.placeholder(name)
    node.target = node.name  # which is one of its own
    node.meta = {"val": buffer}
    return node


def _add(value: Any, buffer: fx.Node) -> None:
    """Add a value to a (view of a) buffer. What computes it goes away if nothing else reads it and the sum can do without."""
    own = not value.users and value.op == "call_function" and value.meta["val"].dtype == buffer.meta["val"].dtype
    if own and value.target in _PRODUCTS and not value.meta["val"].is_complex():  # which would be rounded otherwise than alone
        _insert(_PRODUCTS[value.target], (buffer, *value.args), value)
        value.graph.erase_node(value)
    elif own and _scatters_into_zeros(value):
        value.replace_input_with(value.args[0], buffer)
        _insert(_aten.copy_.default, (buffer, value), value)
    elif own and (terms := _terms(value)):
        value.graph.erase_node(value)
        for term in terms:
            _add(term, buffer)
    elif own and (undone := _undo(value, buffer)) is not None:
        viewed = value.args[0]
        value.graph.erase_node(value)
        _add(viewed, undone)
    else:
        _insert(_aten.add_.Tensor, (buffer, value), value)


def _scatters_into_zeros(value: Any) -> bool:
    if value.target in _SCATTERS:
        accumulates = value.args[3] if len(value.args) > 3 else value.kwargs.get("accumulate", False)
    else:
        accumulates = value.target is _MASKED_SCATTER
    base = value.args[0]
    return bool(accumulates) and base.target is _aten.full.default and base.args[1] == 0 and list(base.users) == [value]


def _terms(value: Any) -> list[fx.Node]:
    """The two terms of a plain sum; none if `value` is anything else."""
    if value.target is not _aten.add.Tensor or value.kwargs or value.args[0] is value.args[1]:
        return []
    whole = value.meta["val"]
    terms = [term for term in value.args if isinstance(term, fx.Node)]
    alike = all(term.meta["val"].shape == whole.shape and term.meta["val"].dtype == whole.dtype for term in terms)
    return terms if len(terms) == 2 and alike else []


def _undo(value: Any, buffer: fx.Node) -> fx.Node | None:
    """The view of the buffer that the argument of `value`, itself a view, is to be added to; None if there is none."""
    whole = buffer.meta["val"]
    if value.target in _COPIES:
        return buffer
    if value.target in _PERMUTATIONS:
        order = list(range(whole.ndim))
        if value.target is _aten.permute.default:
            order = [dim % whole.ndim for dim in value.args[1]]
        elif whole.ndim > 1:
            first, second = value.args[1:] if value.target is _aten.transpose.int else (0, 1)
            order[first], order[second] = order[second], order[first]
        return _view(buffer, _aten.permute.default, [order.index(dim) for dim in range(whole.ndim)])
    if value.target in _RESHAPES:
        shape = list(value.args[0].meta["val"].shape)
        return _view(buffer, _aten.view.default, shape) if all(isinstance(size, int) for size in shape) else None
    return None


def _view(buffer: fx.Node, target: Any, argument: list[int]) -> fx.Node | None:
    whole = buffer.meta["val"]
    try:
        with whole.fake_mode:
            view = target(whole, argument)
    except (RuntimeError, ValueError):  # the buffer's strides do not allow it
        return None
    return _insert(target, (buffer, argument), buffer, view)


def _insert(target: Any, args: tuple[Any, ...], like: fx.Node, value: torch.Tensor | None = None) -> fx.Node:
    """A node right after all that it reads and after `like`, for which it stands to people."""
    graph = like.graph
    last = max(like, *(argument for argument in args if isinstance(argument, fx.Node)))
    with graph.inserting_after(placeholders(graph)[-1] if last.op == "placeholder" else last):
        node = graph.call_function(target, args)
    node.meta = {**like.meta, "val": value}
    node.meta.pop("desc", None)
    return node
