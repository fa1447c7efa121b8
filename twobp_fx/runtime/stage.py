"""Run one stage: bind its program to live tensors, keep what each micro-batch holds between F, I and W, sum up its gradients.

Lives for one step. Nothing here touches `.grad`: the sums are handed to whoever commits them when the whole step went well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..emit import Compiled
from ..program import Role, StageProgram, Value
from .gradients import new_buffer
from .strides import with_strides

_RANDOM_STATE = threading.Lock()
_MASK = (1 << 64) - 1
_OUR_OWN = (Role.RECEIVED, Role.SAVED, Role.STASH)
"""Roles of values that a stage's own graph computed, as traced."""


@dataclass(slots=True)
class _Held:
    """What one micro-batch holds between its forward and its last backward: values by name, and the tangents that never came."""

    values: dict[str, torch.Tensor]
    missing: frozenset[str] = frozenset()


class StageRunner:
    """One stage of one step.

    state: the live parameters and buffers by FQN, and constants by name. inputs: for each micro-batch, the caller's flat inputs.
    seed: what random draws derive from, together with the stage and the micro-batch, and nothing else.
    `gradients` holds the sums over micro-batches, by parameter FQN; `input_gradients[micro-batch]` those of the caller's inputs.
    """

    def __init__(
        self,
        program: StageProgram,
        *,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        seed: int,
    ) -> None:
        self.program = program
        self._state = {Role.PARAMETER: parameters, Role.BUFFER: buffers, Role.CONSTANT: constants}
        self._inputs = inputs
        self._seed = seed
        self._held: dict[int, _Held] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.input_gradients: dict[int, dict[str, torch.Tensor]] = {}
        self._kept_after_input = {value.name for value in program.signatures["backward_weight"].takes}

    @property
    def held(self) -> int:
        """How many micro-batches still hold something."""
        return len(self._held)

    def forward(self, microbatch: int, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """F: returns what the next stage receives, by name. Buffer updates take effect."""
        signature = self.program.signatures["forward"]
        args = [_conform(self._argument(value, microbatch, received), value) for value in signature.takes]
        with _draws(self.program, self._seed, microbatch):
            results = _call(self.program.forward, args, signature.returns)
        held = {value.name: arg for value, arg in zip(signature.takes, args, strict=True)}
        sent: dict[str, torch.Tensor] = {}
        for value, result in zip(signature.returns, results, strict=True):
            if value.role is Role.BUFFER_UPDATE:
                self._state[Role.BUFFER][value.key].copy_(result)
            elif value.role is Role.SENT:
                sent[value.key] = result
            held[value.name] = result
        needed = {value.name for value in self.program.signatures["backward"].takes}
        self._held[microbatch] = _Held({name: tensor for name, tensor in held.items() if name in needed})
        return {name: sent[name] if name in sent else received[name] for name in self.program.sends}

    def _argument(self, value: Value, microbatch: int, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if value.role is Role.RECEIVED:
            return received[value.key]
        if value.role is Role.INPUT:
            return self._inputs[microbatch][int(value.key)]
        return self._state[value.role][value.key]

    def backward_input(self, microbatch: int, tangents: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """I: takes the gradients of what F sent, returns those of what it received, by name; None where autograd has None."""
        held = self._take_tangents(microbatch, tangents)
        signature = self.program.signatures["backward_input"]
        if not signature.returns or self._nothing_arrived(held):
            results: Sequence[torch.Tensor | None] = [None] * len(signature.returns)
        else:
            results = self._run(self.program.backward_input, signature.takes, signature.returns, held)
        for value, result in zip(signature.returns, results, strict=True):
            if value.role is Role.STASH and result is not None:
                held.values[value.name] = result
        held.values = {name: tensor for name, tensor in held.values.items() if name in self._kept_after_input}
        return self._input_gradients(microbatch, signature.returns, results, tangents)

    def backward_weight(self, microbatch: int) -> None:
        """W: adds this micro-batch's parameter gradients to `gradients` and releases all it held."""
        self._accumulate("backward_weight", self._held.pop(microbatch))

    def backward(self, microbatch: int, tangents: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """B: I and W at once."""
        held = self._take_tangents(microbatch, tangents)
        del self._held[microbatch]
        results = self._accumulate("backward", held)
        return self._input_gradients(microbatch, self.program.signatures["backward"].rest, results, tangents)

    def clear(self) -> None:
        """Let go of everything that was held or summed up."""
        self._held.clear()
        self.gradients.clear()
        self.input_gradients.clear()

    def release(self, microbatch: int) -> dict[str, torch.Tensor]:
        """Give away what a micro-batch holds after F, by name."""
        return self._held.pop(microbatch).values

    def resume(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Take back what `release` gave away, so that the backward can run."""
        self._held[microbatch] = _Held(dict(values))

    def _take_tangents(self, microbatch: int, tangents: Mapping[str, torch.Tensor | None]) -> _Held:
        held = self._held[microbatch]
        missing: set[str] = set()
        wanted = [value for value in self.program.signatures["backward"].takes if value.role is Role.TANGENT]
        for value in wanted:
            tangent = tangents.get(value.key)
            if tangent is None:
                missing.add(value.name)
                tangent = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            held.values[value.name] = _conform(tangent, value)
        held.missing = frozenset(missing)
        return held

    def _run(
        self,
        function: Compiled,
        takes: Sequence[Value],
        returns: Sequence[Value],
        held: _Held,
        buffers: Sequence[torch.Tensor] = (),
    ) -> Sequence[torch.Tensor | None]:
        """Run one backward callable. A gradient whose tangents all failed to arrive is None, as autograd has it."""
        args = [_conform(held.values[value.name], value) for value in takes]
        results = _call(function, [*args, *buffers], returns)
        # What I stashes W may still need, for a gradient that does exist.
        return [
            None if value.role is not Role.STASH and self._is_none(value, held) else result
            for value, result in zip(returns, results, strict=True)
        ]

    def _accumulate(self, name: str, held: _Held) -> Sequence[torch.Tensor | None]:
        """Run W or B, adding parameter gradients into `gradients`; what else it returns."""
        signature = self.program.signatures[name]
        if not signature.returns or self._nothing_arrived(held):
            return [None] * len(signature.rest)
        buffers = [self._buffer(value, held) for value in signature.parameter_gradients]
        return self._run(self.program.accumulating(name), signature.takes, signature.rest, held, buffers)

    def _buffer(self, gradient: Value, held: _Held) -> torch.Tensor:
        """Where to add a parameter's gradient: to its sum, or, if autograd would have None for it, where it is forgotten."""
        if self._is_none(gradient, held):
            return new_buffer(self.program.buffers[gradient.name])
        if gradient.key not in self.gradients:
            self.gradients[gradient.key] = new_buffer(self.program.buffers[gradient.name])
        return self.gradients[gradient.key]

    def _is_none(self, gradient: Value, held: _Held) -> bool:
        """Whether autograd would have None for a gradient: it is computed from tangents of which none arrived."""
        needs = self.program.gradient_needs.get(gradient.name, frozenset())
        return bool(needs) and needs <= held.missing

    def _nothing_arrived(self, held: _Held) -> bool:
        return all(needs and needs <= held.missing for needs in self.program.gradient_needs.values())

    def _input_gradients(
        self,
        microbatch: int,
        returns: Sequence[Value],
        results: Sequence[torch.Tensor | None],
        tangents: Mapping[str, torch.Tensor | None],
    ) -> dict[str, torch.Tensor | None]:
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(self.program.receives)
        for value, result in zip(returns, results, strict=True):
            if value.role is Role.RECEIVED_GRADIENT:
                gradients[value.key] = result
            elif value.role is Role.INPUT_GRADIENT and result is not None:
                self.input_gradients.setdefault(microbatch, {})[value.key] = result
        for name in self.program.receives:  # what was handed on untouched: the gradient comes back the same way
            if name in self.program.sends:
                gradients[name] = _sum(gradients[name], tangents.get(name))
        return gradients


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second.to(first.device)


def _call(function: Compiled, args: Sequence[torch.Tensor], returns: Sequence[Value]) -> tuple[torch.Tensor, ...]:
    results = function(args)
    if len(results) != len(returns):
        raise RuntimeError(f"the compiled callable returned {len(results)} values where {len(returns)} are expected")
    return results


def _conform(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """The tensor where the graph runs, with the strides it was compiled for; a compiler may have returned others."""
    if tensor.device != value.device:
        tensor = tensor.to(value.device, non_blocking=True)
    if tensor.stride() == value.stride or tensor.numel() == 0:
        return tensor
    return with_strides(tensor, value.stride, own=value.role in _OUR_OWN)


@contextmanager
def _draws(program: StageProgram, seed: int, microbatch: int) -> Iterator[None]:
    """Random state for one F: derived from the seed, the stage and the micro-batch, so that neither the schedule nor the timing of
    threads matters. The default generator is one for all threads, hence the lock; stages that draw nothing take none.
    """
    if not program.draws:
        yield
        return
    devices = {value.device for value in program.signatures["forward"].takes if value.device.type != "cpu"}
    with _RANDOM_STATE:
        device_type = next((device.type for device in devices), "cuda")
        indices = [device.index or 0 for device in devices if device.type != "meta"]
        with torch.random.fork_rng(devices=indices, device_type=device_type):
            torch.default_generator.manual_seed(derive_seed(seed, program.index, microbatch))
            for device in devices:
                torch.get_device_module(device).manual_seed(derive_seed(seed, program.index, microbatch))
            yield


def fresh_seed() -> int:
    """A seed from torch's default generator: the same after the same torch.manual_seed, another at every call.

    Never drawn while a stage has the generator in a state of its own.
    """
    with _RANDOM_STATE:
        return int(torch.randint(2**63 - 1, ()))


def derive_seed(seed: int, stage: int, microbatch: int) -> int:
    """A 63-bit seed from three numbers, by the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = seed & _MASK
    for number in (stage, microbatch):
        state = (state + 0x9E3779B97F4A7C15 * (number + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
