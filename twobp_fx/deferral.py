"""Weight gradients put off: run a backward's I now, keep its W's, run them when there is time.

Where I leaves off. Autograd runs the backward as always, but towards a chosen set of leaves: all that are reached except the
parameters whose gradients are put off. Their AccumulateGrad nodes do not run, so no hook of theirs fires. W, later, hands the
gradients to the same nodes: tensor hooks, post-accumulate hooks, DDP's reducer and optimizers in the backward see each once.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from tabulate import tabulate
from torch.autograd.graph import GradientEdge, Node

from .errors import InputError
from .passes.graph import storage_key
from .runtime.autocast import as_traced
from .runtime.gradients import accumulate, engine, new_buffer


class Deferrable(Protocol):
    """A compiled graph whose parameter gradients can be put off. Autograd sees each call of it as one node.

    label: for people. parameters: the slots (edges of the node) that lead to parameters, with their names. deferred: the calls
    whose backward is running now, and which shall put off their W.
    """

    label: str
    parameters: dict[int, str]
    deferred: dict[Node | None, Deferral]


@dataclass(frozen=True, slots=True)
class Deferral:
    """What one call's backward has to do: run I, with the gradients of `kept` parameters (slot: why), and put off the rest."""

    pending: PendingWeightGradients
    kept: Mapping[int, str]
    parameters: Mapping[int, torch.Tensor]


class WeightGradients:
    """W of one call of one compiled graph.

    label: the graph's. parameters: those that get a gradient, by name. kept: names of those whose gradient was computed in I
    already, with the reason. nbytes: what it holds, in bytes, besides the parameters themselves. waiting: whether it is still to be
    run; never if it has no parameters.

    buffers: for each parameter, a (fake) tensor laid out as the buffer that its gradient is added to; None if it comes by itself.
    compute: from what is held, adds the gradients of the former to the buffers it is given, and returns those of the latter.
    """

    def __init__(
        self,
        label: str,
        parameters: Mapping[str, torch.Tensor],
        kept: Mapping[str, str],
        held: Sequence[tuple[str, Any]],
        buffers: Sequence[torch.Tensor | None],
        compute: Callable[[Sequence[Any], Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        self.label = label
        self.parameters = parameters
        self.kept = kept
        self.waiting = bool(parameters)
        self._held = [value for _, value in held] if parameters else []
        self._versions = [(name, _version(value)) for name, value in held]
        self._buffers = buffers
        self._compute = compute
        own = storages(parameters.values())
        self.nbytes = sum(size for key, size in storages(self._held).items() if key not in own)

    def run(self) -> None:
        """Compute the gradients and accumulate them into `.grad`; every hook of a parameter fires once.

        If computing them fails, the error is raised. This stays pending, unless a part may have reached a `.grad` by then: the
        error's notes say so. Raises InputError if it is not pending, and if a tensor it reads was changed in place after I.
        """
        if not self.waiting:
            raise InputError(f"The weight gradients of {self.label} are not pending: they were run, or dropped.")
        self._refuse_changed()
        leaves = list(self.parameters.values())
        frozen = [leaf for leaf in leaves if not leaf.requires_grad]  # since I; their gradients are wanted all the same
        try:
            for leaf in frozen:
                leaf.requires_grad_(True)
            accumulate(leaves, self._gradients)
        finally:
            for leaf in frozen:
                leaf.requires_grad_(False)

    def _refuse_changed(self) -> None:
        for value, (name, version) in zip(self._held, self._versions, strict=True):
            if _version(value) != version:
                raise InputError(
                    f"The weight gradients of {self.label} cannot be computed any more: {name} was changed in place after "
                    f"their backward ran (it is at version {_version(value)}; expected version {version}). Run them before an "
                    "optimizer steps or anything else writes to it; or drop() them."
                )

    def _gradients(self) -> list[torch.Tensor | None]:
        """The gradients for autograd to accumulate; None for a parameter whose `.grad` they were added to right away."""
        read = storages(self._held).keys()
        leaves = list(self.parameters.values())
        likes = self._buffers
        straight = [like is not None and _can_be_added_to(leaf, like, read) for leaf, like in zip(leaves, likes, strict=True)]
        into = [
            leaf.grad if direct else like if like is None else new_buffer(like)
            for leaf, like, direct in zip(leaves, likes, straight, strict=True)
        ]
        devices = {each.device for each in (*self._held, *into) if isinstance(each, torch.Tensor)}
        try:
            with as_traced(devices):
                returned = iter(self._compute(self._held, [buffer for buffer in into if buffer is not None]))
        except BaseException as error:
            if any(straight):
                self.drop()
                error.add_note(
                    f"The weight gradients of {self.label} may have been added to .grad in part. Set the gradients to zero and "
                    "repeat the step."
                )
            raise
        self.drop()
        gradients: list[torch.Tensor | None] = []
        for buffer, direct in zip(into, straight, strict=True):
            if direct and buffer is not None:
                torch.autograd.graph.increment_version(buffer)
            gradients.append(None if direct else next(returned) if buffer is None else buffer)
        return gradients

    def drop(self) -> None:
        """Let go of all it holds; it can no longer be run."""
        self.waiting = False
        self._held = []


def _can_be_added_to(leaf: torch.Tensor, like: torch.Tensor, read: Collection[object]) -> bool:
    """Whether a gradient may be added to `leaf.grad` outside of autograd: it is as W was compiled for, W does not read its storage,
    and no hook wants to see the gradient by itself. Hooks of the leaf's AccumulateGrad (DDP's) still run.
    """
    buffer = leaf.grad
    return (
        type(buffer) is torch.Tensor
        and (buffer.layout, buffer.shape, buffer.dtype, buffer.device) == (like.layout, like.shape, like.dtype, like.device)
        and buffer.stride() == like.stride()
        and not (buffer.requires_grad or buffer.is_inference())
        and storage_key(buffer) not in read
        and not (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
    )


class PendingWeightGradients:
    """W's waiting to be run, in the order in which their I's ran: one a call of a compiled graph."""

    def __init__(self) -> None:
        self._added: list[WeightGradients] = []

    def __len__(self) -> int:
        return sum(each.waiting for each in self._added)

    def __iter__(self) -> Iterator[WeightGradients]:
        """Over those waiting now; each can be run on its own."""
        return iter([each for each in self._added if each.waiting])

    def __str__(self) -> str:
        """A table of what is pending, and of what could not be put off, with the reason."""
        rows = [
            [i, each.label, len(each.parameters), each.nbytes, "; ".join(f"{name}: {why}" for name, why in each.kept.items())]
            for i, each in enumerate(each for each in self._added if each.waiting or not each.parameters)
        ]
        return tabulate(rows, headers=["", "call of", "parameters", "bytes held", "computed in I instead"])

    @property
    def nbytes(self) -> int:
        """Bytes that the pending W's hold, besides parameters; storage that several hold is counted for each."""
        return sum(each.nbytes for each in self)

    def run(self, n: int | None = None) -> int:
        """Run the first n of them, or all; says how many ran. Raises InputError for a negative n."""
        if n is not None and n < 0:
            raise InputError(f"run({n}): give how many weight gradients to run, or nothing for all.")
        batch = list(self)[:n]
        for each in batch:
            each.run()
        self._added = list(self)
        return len(batch)

    def drop(self) -> int:
        """Throw away what is pending; its parameters get no gradient from it. Says how many were dropped."""
        dropped = list(self)
        for each in dropped:
            each.drop()
        self._added = []
        return len(dropped)

    def backward(self, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None) -> None:
        """As `torch.autograd.backward`, but the W of every call of a graph compiled by this backend is put off, and added here.

        What cannot be put off is computed at once: parameters that one backward reaches on more than one way, and all that was
        not compiled by this backend. Where the backward passes through a checkpoint with `use_reentrant=True`, which refuses to run
        towards chosen leaves, only what is inside such a checkpoint is put off.
        """
        tensors = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
        reached = _Reached(tensors)
        deferrals = reached.deferrals(self)
        later = {leaf for deferral in deferrals.values() for leaf in deferral.parameters.values()}
        targets = [leaf for leaf in reached.ways if leaf not in later and leaf.requires_grad] if later else None
        try:
            for (node, graph), deferral in deferrals.items():
                graph.deferred[node] = deferral
            engine(tensors, grad_tensors, retain_graph=retain_graph, inputs=targets)
        finally:
            for node, graph in deferrals:
                graph.deferred.pop(node, None)

    def add(self, each: WeightGradients) -> None:
        """Put another one at the end; one that has neither parameters nor anything to say about them is left out."""
        if each.parameters or each.kept:
            self._added.append(each)

    def __del__(self) -> None:
        if len(self):
            warnings.warn(
                f"{len(self)} weight gradients were put off and never run: their parameters' .grad lack them. Call "
                "run() on what defer_weight_grads() gives, or drop() to say that they are not wanted.",
                RuntimeWarning,
                stacklevel=2,
            )


@contextmanager
def defer_weight_grads() -> Iterator[PendingWeightGradients]:
    """A context in which `loss.backward()` and `torch.autograd.backward` run I alone; W is left to the object it gives.

        with twobp_fx.defer_weight_grads() as pending:
            loss.backward()
        pending.run()

    It concerns calls of modules compiled with `torch.compile(..., backend="twobp")`, and this thread. A backward towards chosen
    `inputs`, and one with `create_graph`, is autograd's own business: nothing is put off. What is pending when an exception leaves
    the context stays pending, and the exception's notes say so.
    """
    pending = PendingWeightGradients()
    with _intercepting():
        _local.stack = [*_stack(), pending]
        try:
            yield pending
        except BaseException as error:
            if pending:
                error.add_note(
                    f"{len(pending)} weight gradients are pending: run() or drop() them on what defer_weight_grads() gave."
                )
            raise
        finally:
            _local.stack = _stack()[:-1]


def running_node() -> Node | None:
    """The node of autograd's graph that is running now in this thread."""
    node: Node | None = torch._C._current_autograd_node()
    return node


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf that a node of autograd's graph accumulates into; None for any other node."""
    if node is not None and node.name() == "torch::autograd::AccumulateGrad":
        variable: torch.Tensor = node.variable
        return variable
    return None


_ARRIVALS = "twobp_fx.arrivals"


def note_arrivals(gradients: Sequence[torch.Tensor | None]) -> None:
    """A prehook of a node: notes which of its outputs get a gradient, before the missing ones are made zeros."""
    node = running_node()
    if node is not None:
        _metadata(node)[_ARRIVALS] = [gradient is not None for gradient in gradients]


def arrivals(node: Node | None) -> Sequence[bool] | None:
    """What `note_arrivals` noted for this run of the node; None if nothing."""
    return None if node is None else _metadata(node).pop(_ARRIVALS, None)


def _metadata(node: Node) -> dict[Any, Any]:
    return cast("dict[Any, Any]", node.metadata)  # a property, whatever torch's annotation says


def new_anchor(graph: Deferrable) -> torch.Tensor:
    """A leaf to be an input of every call of `graph`.

    It marks the call's node, and makes the engine run it even where nothing but put-off parameters lies behind it.
    """
    anchor = torch.zeros((), requires_grad=True)
    anchor._twobp_graph = graph  # type: ignore[attr-defined]
    return anchor


class _Reached:
    """What a backward from some tensors reaches.

    ways: its leaves, with the number of ways into each. calls: of compiled graphs. checkpoint: whether one is there that refuses to
    run towards chosen leaves.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.ways: Counter[torch.Tensor] = Counter()
        self.calls: dict[Node, Deferrable] = {}
        self.checkpoint = False
        seen: set[Node] = set()
        stack: list[Node] = []

        def reach(node: Node | None) -> torch.Tensor | None:
            leaf = leaf_of(node)
            if leaf is not None:
                self.ways[leaf] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
            return leaf

        for tensor in tensors:
            if isinstance(tensor, GradientEdge):
                reach(tensor.node)
            elif tensor.grad_fn is None and tensor.requires_grad:
                self.ways[tensor] += 1
            else:
                reach(tensor.grad_fn)
        while stack:
            node = stack.pop()
            self.checkpoint |= node.name() == "CheckpointFunctionBackward"
            for following, _ in node.next_functions:
                graph = getattr(reach(following), "_twobp_graph", None)
                if graph is not None:
                    self.calls[node] = graph

    def deferrals(self, pending: PendingWeightGradients) -> dict[tuple[Node, Deferrable], Deferral]:
        """For every call: which parameters' gradients can be put off. One that this backward reaches once, and as a leaf."""
        found: dict[tuple[Node, Deferrable], Deferral] = {}
        for node, graph in self.calls.items():
            kept: dict[int, str] = {}
            parameters: dict[int, torch.Tensor] = {}
            for slot in graph.parameters:
                following = node.next_functions[slot][0]
                leaf = leaf_of(following)
                if following is None or (leaf is not None and not leaf.requires_grad):
                    continue
                if self.checkpoint:
                    kept[slot] = "this backward passes through a checkpoint with use_reentrant=True"
                elif leaf is None:
                    kept[slot] = "it is computed from something else"
                elif self.ways[leaf] > 1:
                    kept[slot] = "this backward also reaches it on another way"
                else:
                    parameters[slot] = leaf
            found[node, graph] = Deferral(pending, kept, parameters)
        return found


def storages(values: Iterable[Any]) -> dict[object, int]:
    """The sizes in bytes of the storages behind values; what is no tensor, or a sparse one, has none."""
    strided = [each for each in values if isinstance(each, torch.Tensor) and each.layout == torch.strided]
    return {storage_key(each): each.untyped_storage().nbytes() for each in strided}


def _version(value: Any) -> int | None:
    """Counts the writes in place into a tensor's storage; None for what does not count them."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


class _Local(threading.local):
    stack: list[PendingWeightGradients]


_local = _Local()
_users = 0
_replaced = engine
_lock = threading.Lock()


def _stack() -> list[PendingWeightGradients]:
    return getattr(_local, "stack", [])


@contextmanager
def _intercepting() -> Iterator[None]:
    """While anybody defers, `torch.autograd.backward` (which `Tensor.backward` calls) looks first whether this thread does.

    Torch has no hook for the start of a backward.
    """
    global _users, _replaced
    with _lock:
        if not _users:
            _replaced, torch.autograd.backward = torch.autograd.backward, _backward
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                torch.autograd.backward = _replaced


@functools.wraps(engine)
def _backward(*args: Any, **kwargs: Any) -> None:
    given = inspect.signature(engine).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    if not _stack() or asked["inputs"] is not None or asked["create_graph"] or asked["grad_variables"] is not None:
        return _replaced(*args, **kwargs)
    return _stack()[-1].backward(asked["tensors"], asked["grad_tensors"], asked["retain_graph"])
