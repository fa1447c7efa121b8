"""Pipeline-parallel training in PyTorch with a split backward, done by a compiler."""

from .api import Pipe, compile
from .errors import CaptureError, CompileError, CutError, InputError, PlanError, SplitError, StageError, TwobpError
from .inspect import print_plan, print_split
from .schedules import Plan

__all__ = [
    "CaptureError",
    "CompileError",
    "CutError",
    "InputError",
    "Pipe",
    "Plan",
    "PlanError",
    "SplitError",
    "StageError",
    "TwobpError",
    "compile",
    "print_plan",
    "print_split",
]
