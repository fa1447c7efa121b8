"""Pipeline-parallel training in PyTorch with a split backward, done by a compiler."""

from .api import Pipe, compile
from .deferral import PendingWeightGradients, WeightGradients, defer_weight_grads
from .errors import CaptureError, CompileError, CutError, InputError, PlanError, SplitError, StageError, TwobpError
from .inspect import print_plan, print_split
from .pipelining import PipelineStage
from .schedules import Plan

__all__ = [
    "CaptureError",
    "CompileError",
    "CutError",
    "InputError",
    "PendingWeightGradients",
    "Pipe",
    "PipelineStage",
    "Plan",
    "PlanError",
    "SplitError",
    "StageError",
    "TwobpError",
    "WeightGradients",
    "compile",
    "defer_weight_grads",
    "print_plan",
    "print_split",
]
