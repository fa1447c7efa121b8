"""What torch.export would lose in silence, refused: hooks, gradients and Python state that are not in the captured graph."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from .errors import CaptureError
from .guards import Identity, attributes, is_among
from .passes.graph import source_line

_DATA: Any = vars(torch._C.TensorBase)["data"]
_CAPTURE = (__file__, os.path.join(os.path.dirname(__file__), "capture.py"))


@dataclass(frozen=True, slots=True)
class ChangedAttributes:
    """Attributes that a forward makes, and tensors it replaces in them, by module FQN and name: of all runs of one capture."""

    made: set[tuple[str, str]] = field(default_factory=set)
    replaced: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def refuse_changed_attributes(model: nn.Module, changed: ChangedAttributes) -> Iterator[None]:
    """Refuse a forward that keeps something for its next run in an attribute: a captured forward runs no Python.

    An attribute that it makes and that nothing has asked for before (a loss to be read by loss_fn, say) may pass: no earlier run
    can have mattered. `changed.made` collects these over the runs of one capture, which may be several. So may the lists of their
    own parameters that torch's recurrent layers renew, and a tensor in place of another: `refuse_carried_state` asks if that
    one was read.
    """
    made = changed.made
    before = attributes(model)
    asked: set[tuple[int, str]] = set()
    original = nn.Module.__getattr__
    capturing = threading.get_ident()

    def watch(module: nn.Module, name: str) -> Any:
        try:
            return original(module, name)
        except AttributeError:
            if threading.get_ident() == capturing:
                asked.add((id(vars(module)), name))
            raise

    setattr(nn.Module, "__getattr__", watch)  # noqa: B010  (a plain assignment is no method's type)
    try:
        yield
    finally:
        setattr(nn.Module, "__getattr__", original)  # noqa: B010
    after = attributes(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for fqn, name in before.keys() | after.keys():
        if not name or before.get((fqn, name)) == after.get((fqn, name)):
            continue  # (which object stands for a module: while it is captured, one that is shared has several)
        module = modules[fqn]
        old = _held_tensor(before.get((fqn, name)))
        if name in vars(module) and old is not None and _held_tensor(after.get((fqn, name))) is not None:
            changed.replaced.setdefault((fqn, name), old)
            continue
        unasked = not hasattr(type(module), name) and (id(vars(module)), name) not in asked
        new = (fqn, name) in made or ((fqn, name) not in before and unasked)
        if new:
            made.add((fqn, name))
            continue
        if isinstance(module, nn.RNNBase) and name.startswith("_flat_weight"):
            continue
        raise CaptureError(
            f"The forward assigns to attribute '{name}' of module '{fqn}' ({type(module).__name__}). A captured forward "
            "runs no Python, so the attribute would stay as it is. Keep such state in a buffer and update it in place "
            "(buffer.add_(1)), or assign it outside of the forward."
        )


def _held_tensor(key: object) -> torch.Tensor | None:
    return key.value if isinstance(key, Identity) and isinstance(key.value, torch.Tensor) else None


def refuse_carried_state(changed: ChangedAttributes, constants: Mapping[str, Any]) -> None:
    """Refuse a forward that read a tensor (it is among the capture's constants) which it then replaced in its attribute."""
    for (fqn, name), old in changed.replaced.items():
        if is_among(old, constants):
            raise CaptureError(
                f"The forward reads attribute '{name}' of module '{fqn}' and then assigns to it, to carry it from call to "
                "call. A captured forward runs no Python, so it would stay as it is. Keep such state in a buffer and update it in "
                "place (buffer.copy_(...))."
            )


def _is_foreign(value: torch.Tensor) -> bool:
    """Whether a real tensor that requires a gradient would be differentiated here. The model's own are fake meanwhile."""
    return torch.is_grad_enabled() and not is_functorch_wrapped_tensor(value)


class StrictTracing(TorchFunctionMode):
    """Watches a forward for what torch.export would lose in silence.

    Refuses gradient hooks on tensors, and tensors that require a gradient and are none of the model's (those are fake while it is
    captured). Reads `.data` as `.detach()`, which is traced: a write through it reaches the graph.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            raise CaptureError(
                f"The model's forward assigns to `.data` of a tensor, {_caller()}, which a captured forward would lose. Write in "
                "place into a buffer instead (buffer.copy_(...))."
            )
        for value in pytree.tree_leaves((args, kwargs)):
            if type(value) in (torch.Tensor, nn.Parameter) and value.requires_grad and _is_foreign(value):
                raise CaptureError(
                    f"The forward reads a tensor of shape {list(value.shape)} that requires a gradient and is no parameter of the "
                    f"model, {_caller()}: it would get none. Register it as a parameter of the model (for a loss: pass a "
                    "module as loss_fn), or detach it."
                )
        if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
            raise CaptureError(
                f"The model's forward calls {func.__name__} on a tensor, {_caller()}. Such a hook would never run: a captured "
                "graph holds operators alone. Do what the hook does in the forward, or hook a parameter outside of the forward."
            )
        return func(*args, **(kwargs or {}))


def refuse_backward_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules, given with their FQNs, that have backward hooks: torch.export would drop them."""
    for fqn, module in modules:
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"Module '{fqn}' ({type(module).__name__}) has a backward hook, which would never run: a captured graph "
                "holds operators alone. Remove the hook, or hook the parameters instead (parameter.register_hook)."
            )


@contextlib.contextmanager
def refuse_autograd_functions() -> Iterator[None]:
    """Refuse a forward that applies a `torch.autograd.Function`, whose backward torch.export would drop.

    It keeps a forward's operators alone, so that the Function would be differentiated as its forward is written.
    Those may pass that torch wraps around operators whose backward is kept (its private packages), and checkpointing, whose
    derivative is that of its forward. Others of torch's own may not: an all-reduce is no identity backward.
    """
    capturing = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and threading.get_ident() == capturing:
            function, _preserve_rng_state, *given = args
            return function(*given)  # what is saved and recomputed is decided by the partition, not here
        if threading.get_ident() == capturing and not cls.__module__.startswith(("torch._", CheckpointFunction.__module__)):
            raise CaptureError(
                f"The model applies {cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, {_caller()}. torch.export "
                "keeps its forward and drops its backward, so its gradient would be wrong. Make it a custom operator instead "
                "(torch.library.custom_op with register_autograd), whose backward is kept."
            )
        return super(base, cls).apply(*args, **kwargs)

    # One class above Function, where every call passes: also that of an `apply` which was bound before.
    base: Any = torch.autograd.Function.__mro__[1]
    setattr(base, "apply", classmethod(apply))  # noqa: B010  (a plain assignment is no method's type)
    try:
        yield
    finally:
        delattr(base, "apply")


def refuse_functorch_transforms(graph: fx.Graph) -> None:
    """Refuse a captured graph with a transform of torch.func in it."""
    for node in graph.nodes:
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise CaptureError(
                f"The forward uses a transform of torch.func ({getattr(node.target, '__name__', node.target)}, at "
                f"{source_line(node) or 'an unknown line'}), which cannot be cut into stages. Write the computation out, or "
                "leave it outside of the model."
            )


def _caller() -> str:
    """Where the model's own code called, for a message: the innermost frame outside of torch and of capture."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename not in _CAPTURE and f"{os.sep}torch{os.sep}" not in frame.filename:
            return f"at {frame.filename}:{frame.lineno}"
    return "at an unknown place"
