"""One step of a pipeline plan: a stage does one kind of work for one micro-batch.

The letters are those of `torch.distributed.pipelining`, where B is the full backward and I the gradient of the input.
Elsewhere they differ: B in the zero-bubble papers (arXiv 2401.10241) is our I; p1 and p2 of 2BP (arXiv 2405.18047) are
our I and W.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ..errors import PlanError

__all__ = ["MAX_INDEX", "Action", "ActionKind"]

MAX_INDEX = 999_999
"""The largest stage and micro-batch number: a bound on what a plan read from a file can make us allocate."""

_COMPUTE = re.compile(r"(0|[1-9][0-9]{0,5})([FIWB])(0|[1-9][0-9]{0,5})")
_OTHER_TORCH_ACTION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*|\(.*\)OVERLAP_F_B")


class ActionKind(StrEnum):
    """What is computed. The values are torch's letters."""

    F = "F"
    """Forward: activations for the next stage."""
    I = "I"
    """Backward-input: gradients for the previous stage."""
    W = "W"
    """Backward-weight: gradients of the stage's own parameters."""
    B = "B"
    """Full backward: I and W in one."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Stage `stage` computes `kind` for micro-batch `microbatch`; both are counted from 0.

    `str(action)` is torch's action text (`2F0`: stage 2, forward, micro-batch 0), and `Action.parse` reads it back.
    Raises PlanError for numbers outside 0..MAX_INDEX and for a kind that is no `ActionKind`.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __post_init__(self) -> None:
        if not (0 <= self.stage <= MAX_INDEX and 0 <= self.microbatch <= MAX_INDEX):
            raise PlanError(f"stage {self.stage}, micro-batch {self.microbatch}: an action's numbers must be from 0 to {MAX_INDEX}")
        if not isinstance(self.kind, ActionKind):
            raise PlanError(f"{self.kind!r} is no kind of action; use one of ActionKind.F, .I, .W and .B")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` names, such as `2F0`; the reverse of `str`.

        Raises PlanError for every other text, torch's communication and overlap actions included.
        """
        if match := _COMPUTE.fullmatch(text):
            stage, kind, microbatch = match.groups()
            return cls(int(stage), ActionKind(kind), int(microbatch))
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        if text.endswith("OVERLAP_F_B") and _OTHER_TORCH_ACTION.fullmatch(text):
            raise PlanError(f"{shown} is a pair of overlapped actions; write the two one after the other, in a compute-only plan")
        if _OTHER_TORCH_ACTION.fullmatch(text):
            raise PlanError(
                f"{shown} is no computation; a compute-only plan is expected: leave out communication, sharding and "
                "gradient reduction, which the executor adds by itself"
            )
        raise PlanError(
            f"{shown} is no action; expected stage, one of F, I, W and B, and micro-batch, such as 2F0 "
            f"(numbers up to {MAX_INDEX}, without leading zeros)"
        )
