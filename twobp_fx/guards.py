"""Guards: what a capture depends on besides the values of tensors, as dictionary keys. A new key is a new capture."""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake

from .inputs import Inputs
from .passes.graph import storage_key
from .runtime.gradients import gradient_dtype

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""What is known by its value, and is a constant wherever a graph holds it."""
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Identity:
    """An object by identity, as part of a dictionary key. Keeps it alive, so that no other object can take its place."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def by_value_or_identity(value: object, seen: dict[int, tuple[object, object]] | None = None) -> object:
    """A dictionary key for anything: plain values, containers, functions and plain objects by what they hold, all else by identity.

    seen: objects met already, by id, with their keys; one that holds itself is known by identity where it does.
    """
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Identity):
        return value
    function = isinstance(value, types.FunctionType)
    if not function and (isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value)):
        return Identity(value)
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = value, Identity(value)
        if isinstance(value, types.FunctionType):  # the same code over the same values is the same function
            cells = [_contents(cell) for cell in value.__closure__ or ()]
            held: list[object] = [Identity(value.__code__), *cells, value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, Mapping):
            held = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, collections.deque)):
            held = list(value)
        elif isinstance(value, (set, frozenset)):
            seen[id(value)] = value, (type(value), frozenset(by_value_or_identity(item, seen) for item in value))
            return seen[id(value)][1]
        else:
            held = [item for pair in getattr(value, "__dict__", {}).items() for item in pair]
            if not held:
                return seen[id(value)][1]
        seen[id(value)] = value, (type(value), tuple(by_value_or_identity(item, seen) for item in held))
    return seen[id(value)][1]


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def attributes(model: nn.Module) -> dict[tuple[str, str], object]:
    """What a forward may depend on besides its arguments and the values of parameters and buffers, as dictionary keys.

    By module FQN and attribute: each module's own identity, mode, hooks, parameters, buffers and plain attributes.
    """
    state: dict[tuple[str, str], object] = {}
    seen: dict[int, tuple[object, object]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        state[fqn, ""] = Identity(module)
        state[fqn, "training"] = module.training
        for name in _HOOKS:
            state[fqn, name] = tuple(Identity(hook) for hook in getattr(module, name).values())
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                state[fqn, name] = Identity(tensor)
        for name, value in vars(module).items():
            if name not in _MODULE_INTERNALS:
                state[fqn, name] = by_value_or_identity(value, seen)
    return state


def input_guards(inputs: Inputs) -> tuple[Any, ...]:
    """What a capture depends on in the arguments, as a dictionary key."""
    tensors = tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in inputs.tensors)
    return tensors, tuple(by_value_or_identity(leaf) for leaf in inputs.template), inputs.spec


def state_guards(modules: Sequence[nn.Module], loss_fn: object) -> tuple[Any, ...]:
    """What a capture depends on besides the arguments: attributes, the layout of parameters and buffers, autocast."""
    state = [
        (name, tensor)
        for module in modules
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    ]
    kinds = {"cpu"} | {tensor.device.type for _, tensor in state if not tensor.is_meta}
    first: dict[int, str] = {}  # which names stand for one tensor: tied ones
    return (
        tuple((key, _but_tensors(value)) for module in modules for key, value in attributes(module).items()),
        by_value_or_identity(loss_fn),
        tuple(
            (name, first.setdefault(id(t), name), tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, gradient_dtype(t))
            for name, t in state
        ),
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
    )


def _but_tensors(value: object) -> object:
    """A forward may leave a tensor on its module at every call: which one it is counts only if a capture read it."""
    tensor = value.value if isinstance(value, Identity) else None
    return torch.Tensor if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter) else value


def attributes_among(
    constants: Mapping[str, torch.Tensor], owners: Sequence[nn.Module]
) -> tuple[tuple[nn.Module, str, torch.Tensor], ...]:
    """The tensors in attributes of `owners` and their submodules that are among a capture's constants: (module, name, tensor)."""
    return tuple(
        (module, name, value)
        for owner in owners
        for module in owner.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and is_among(value, constants)
    )


def is_among(tensor: torch.Tensor, constants: Mapping[str, Any]) -> bool:
    """Whether one of a capture's constants is this tensor, or shares its storage."""
    if is_fake(tensor) or is_functorch_wrapped_tensor(tensor) or tensor.layout is not torch.strided:
        return False
    held = (value for value in constants.values() if isinstance(value, torch.Tensor))
    return any(not is_functorch_wrapped_tensor(value) and storage_key(value) == storage_key(tensor) for value in held)
