"""StageProgram and the calling convention: what each of a stage's callables takes and returns.

A stage's values have one name throughout its four graphs. With h the value received and y the one sent:

    F  forward          (parameters, buffers, constants, inputs, h)  ->  (buffer updates, y, saved)
    I  backward_input   (saved it reads, dy)                         ->  (dh, gradients of differentiable inputs, stash)
    W  backward_weight  (saved it reads, dy if read, stash)          ->  (one gradient a parameter)
    B  backward         (saved, dy)                                  ->  (what I returns without the stash, what W returns)

The first stage receives nothing and the last sends the model's outputs (for a step: the loss, whose tangent is 1/microbatches).
Saved values that are F's own arguments (parameters, inputs) are not returned by F: whoever called F has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import fx

from .emit import Compiled, Emitter
from .passes.accumulate_grads import accumulate_grads


class Role(StrEnum):
    """What a value is to the stage."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    RECEIVED = "received"
    BUFFER_UPDATE = "buffer update"
    SENT = "sent"
    SAVED = "saved"
    TANGENT = "tangent"
    STASH = "stash"
    PARAMETER_GRADIENT = "parameter gradient"
    INPUT_GRADIENT = "input gradient"
    RECEIVED_GRADIENT = "received gradient"


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor that a callable takes or returns.

    `name` is its name in the stage's graphs. `key` says whose it is: a parameter's or buffer's FQN, a constant's name, the
    position among the caller's flat inputs, or the name under which stages send and receive it.
    """

    name: str
    role: Role
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Size in bytes, of the elements (not of the storage behind a view)."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """What one callable takes and returns, in order."""

    takes: tuple[Value, ...]
    returns: tuple[Value, ...]

    @property
    def parameter_gradients(self) -> tuple[Value, ...]:
        """Of what it returns, the gradients of parameters."""
        return tuple(value for value in self.returns if value.role is Role.PARAMETER_GRADIENT)

    @property
    def rest(self) -> tuple[Value, ...]:
        """Of what it returns, all that is no parameter's gradient."""
        return tuple(value for value in self.returns if value.role is not Role.PARAMETER_GRADIENT)


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """A stage's four graphs. Empty where there is nothing to do: no input gradient (I), no trainable parameter (W)."""

    forward: fx.GraphModule
    backward_input: fx.GraphModule
    backward_weight: fx.GraphModule
    backward: fx.GraphModule

    def items(self) -> list[tuple[str, fx.GraphModule]]:
        """(name, graph) of the four, in the order F, I, W, B."""
        return [(name, getattr(self, name)) for name in GRAPH_NAMES]


GRAPH_NAMES = ("forward", "backward_input", "backward_weight", "backward")
ACCUMULATING = ("backward_weight", "backward")
"""Those that compute gradients of parameters."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes one micro-batch holds of a stage, by distinct storages; parameters and buffers do not count.

    saved: after F.  freed_after_input: of these, what only I needed.  held_for_weight: saved and stashed values W still needs.
    """

    saved: int
    freed_after_input: int
    held_for_weight: int


class StageProgram:
    """One stage, compiled on demand: `forward`, `backward_input`, `backward_weight`, `backward` are the emitted callables.

    signatures: what each takes and returns. receives, sends: the names of what comes from the stage before and goes to the stage
    after. differentiable: those sent values that want a gradient back. gradient_needs: for each gradient, by name, the tangents it
    is computed from; where none of these arrives the gradient is None, as autograd has it. draws: whether F draws random numbers.
    buffers: for each parameter gradient, by name, a (fake) tensor laid out as the buffer in which it is summed up.
    """

    def __init__(
        self,
        *,
        index: int,
        graphs: StageGraphs,
        signatures: Mapping[str, Signature],
        receives: Sequence[str],
        sends: Sequence[str],
        differentiable: frozenset[str],
        gradient_needs: Mapping[str, frozenset[str]],
        memory: StageMemory,
        draws: bool,
        buffers: Mapping[str, torch.Tensor],
        modules: str,
        emitter: Emitter,
    ) -> None:
        self.index = index
        self.graphs = graphs
        self.signatures = signatures
        self.receives = tuple(receives)
        self.sends = tuple(sends)
        self.differentiable = differentiable
        self.gradient_needs = gradient_needs
        self.memory = memory
        self.draws = draws
        self.buffers = buffers
        self.modules = modules
        self._emitter = emitter
        self._compiled: dict[str, Compiled] = {}

    def compiled(self, name: str) -> Compiled:
        """The callable of that name, one of `GRAPH_NAMES`; compiled at the first request. Raises CompileError."""
        return self._compile(name, lambda: getattr(self.graphs, name))

    def accumulating(self, name: str) -> Compiled:
        """W or B, by name, as the executor runs them: takes one buffer more for each parameter gradient, in the order in which the
        callable of that name returns these; adds to it, and returns the rest. Compiled at the first request. Raises CompileError.
        """
        buffers = [self.buffers[value.name] for value in self.signatures[name].parameter_gradients]
        return self._compile(
            f"{name}, accumulating",
            lambda: accumulate_grads(getattr(self.graphs, name), buffers, whole=self._emitter.keeps_order),
        )

    def _compile(self, name: str, graph: Callable[[], fx.GraphModule]) -> Compiled:
        if name not in self._compiled:
            self._compiled[name] = self._emitter.emit(graph(), f"stage {self.index} {name}")
        return self._compiled[name]

    def prepare(self, name: str) -> None:
        """Compile what the executor runs for that name. Raises CompileError."""
        (self.accumulating if name in ACCUMULATING else self.compiled)(name)

    def is_prepared(self, name: str) -> bool:
        """Whether that has been compiled yet."""
        return (f"{name}, accumulating" if name in ACCUMULATING else name) in self._compiled

    @property
    def forward(self) -> Compiled:
        """F."""
        return self.compiled("forward")

    @property
    def backward_input(self) -> Compiled:
        """I."""
        return self.compiled("backward_input")

    @property
    def backward_weight(self) -> Compiled:
        """W."""
        return self.compiled("backward_weight")

    @property
    def backward(self) -> Compiled:
        """B."""
        return self.compiled("backward")

    def __repr__(self) -> str:
        return f"StageProgram({self.index}: {self.modules})"
