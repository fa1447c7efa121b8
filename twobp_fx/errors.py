"""The exceptions. All derive from `TwobpError`; each message says what, where, and what to do."""

from __future__ import annotations

from .passes.errors import CutError, SplitError, TwobpError

__all__ = [
    "CaptureError",
    "CompileError",
    "CutError",
    "InputError",
    "PlanError",
    "SplitError",
    "StageError",
    "TwobpError",
]


class InputError(TwobpError, ValueError):
    """An argument of a public call is wrong. Nothing was run or changed."""


class CaptureError(TwobpError):
    """The model cannot be captured into one graph."""


class CompileError(TwobpError):
    """A compiler failed on one of a stage's graphs."""


class PlanError(TwobpError, ValueError):
    """A schedule is unknown, malformed, or cannot run."""


class StageError(TwobpError, RuntimeError):
    """A stage raised while a plan was running. `.action` and `.stage` say where; `__cause__` is the original error."""

    def __init__(self, message: str, *, action: str, stage: int) -> None:
        super().__init__(message)
        self.action = action
        self.stage = stage
