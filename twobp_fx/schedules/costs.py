"""What actions and messages cost: the numbers that `simulate` and `validate` reckon with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

from ..errors import InputError

__all__ = ["Costs"]

PerStage = float | Sequence[float]

_OPTIONAL = ("backward", "saved", "held_for_weight", "batched_weight")
_WHAT = {"bandwidth": "bandwidths", "comm_bytes": "sizes", "saved": "sizes", "held_for_weight": "sizes"}


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in one unit of the caller's choice, sizes in bytes: each a number, or a sequence with one a stage.

    forward, backward_input, backward_weight: times of F, I and W.
    backward: time of B; None stands for `backward_input + backward_weight`.
    comm: the time that a value takes to another rank, whatever its size; the sequence's entry is that of the stage it
        leaves. Communication delays the receiver and occupies neither rank; between stages of one rank there is none.
    comm_bytes: size of a stage's output. The gradient that comes back for it has the same size.
    bandwidth: bytes in a unit of time; a message takes `comm + comm_bytes / bandwidth`.
    batched_weight: what k adjacent W of a stage take when they run as one, for k = 1, 2, ..., in units of that stage's
        `backward_weight`; such as (1, 1.5, 2) for three W in the time of two. One sequence for all stages, or one a
        stage. Longer runs of W are cut into batches of the largest k. None: k, no gain.
    saved: what F saves for a micro-batch, held until I (M_B of the zero-bubble papers). None: memory is counted in whole
        stages' micro-batches, where a stage is a rank's share of the model over the number of its stages.
    held_for_weight: what of it, and of what I stashed, is held from I to W (M_W). None: all that was saved. What was
        saved and is not held is freed after I; B frees all.
    Raises InputError for a number that is negative or not finite, a bandwidth of 0, and held_for_weight without saved.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    comm: PerStage = 0.0
    comm_bytes: PerStage = 0.0
    bandwidth: float = math.inf
    batched_weight: Sequence[float] | Sequence[Sequence[float]] | None = None
    saved: PerStage | None = None
    held_for_weight: PerStage | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in _OPTIONAL:
                continue
            if field.name == "bandwidth":
                if not isinstance(value, Real) or not float(value) > 0:
                    raise InputError(f"Costs.bandwidth is {value!r}; it must be a number greater than 0")
                continue
            if field.name == "batched_weight":
                object.__setattr__(self, field.name, _batched(value))
                continue
            numbers = tuple(value) if isinstance(value, Sequence) else (value,)
            if not all(map(_is_amount, numbers)):
                what = _WHAT.get(field.name, "times")
                raise InputError(f"Costs.{field.name} is {value!r}; {what} must be numbers, finite and at least 0")
            if isinstance(value, Sequence):
                object.__setattr__(self, field.name, numbers)  # a list changed later then changes nothing here
        if self.held_for_weight is not None and self.saved is None:
            raise InputError("Costs.held_for_weight is given without Costs.saved; give what F saves, too")

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """The numbers in the field `name`, one for each of `stages` stages.

        None is worked out: `backward` as above, `saved` as 1, `held_for_weight` as `saved`. Raises InputError if the
        field is a sequence of another length.
        """
        value = getattr(self, name)
        if value is None:
            if name == "backward":
                parts = (self.per_stage(part, stages) for part in ("backward_input", "backward_weight"))
                return tuple(i + w for i, w in zip(*parts, strict=True))
            return (1.0,) * stages if name == "saved" else self.per_stage("saved", stages)
        if not isinstance(value, tuple):
            return (float(value),) * stages
        if len(value) != stages:
            raise InputError(f"Costs.{name} has {len(value)} entries, but the plan has {stages} stages; give one a stage")
        return tuple(map(float, value))

    def batches(self, stages: int) -> tuple[tuple[float, ...], ...]:
        """For each stage, the time of k adjacent W, k = 1, 2, ..., in the unit of the times.

        Raises InputError if `batched_weight` is for another number of stages.
        """
        factors = self._batch_factors(stages)
        if len(factors) != stages:
            raise InputError(
                f"Costs.batched_weight is for {len(factors)} stages, but the plan has {stages} stages; give one sequence, or "
                "one a stage"
            )
        weight = self.per_stage("backward_weight", stages)
        return tuple(tuple(one * factor for factor in row) for one, row in zip(weight, factors, strict=True))

    def _batch_factors(self, stages: int) -> tuple[tuple[float, ...], ...]:
        given = self.batched_weight or (1.0,)
        if isinstance(given[0], Sequence):
            return cast(tuple[tuple[float, ...], ...], given)
        return (cast(tuple[float, ...], given),) * stages

    def comm_times(self, stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The times that each stage's output, and each stage's input gradient, take to another rank."""
        latency = self.per_stage("comm", stages)
        transfer = [size / self.bandwidth for size in self.per_stage("comm_bytes", stages)]
        outputs = tuple(start + rest for start, rest in zip(latency, transfer, strict=True))
        gradients = tuple(start + rest for start, rest in zip(latency, [0.0, *transfer[:-1]], strict=True))
        return outputs, gradients


def _batched(value: object) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value):
        if all(map(_is_amount, value)):
            return tuple(value)
        if all(isinstance(row, Sequence) and len(row) and all(map(_is_amount, row)) for row in value):
            return tuple(map(tuple, value))
    raise InputError(
        f"Costs.batched_weight is {value!r}; it must be a sequence with the time of k adjacent W over that of one, for "
        "k = 1, 2, ..., or one such sequence a stage: numbers, finite and at least 0"
    )


def _is_amount(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value) and float(value) >= 0
