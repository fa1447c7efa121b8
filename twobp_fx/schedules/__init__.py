"""Pipeline plans: made, checked, simulated, and kept as torch's compute-only CSV. Pure planning: nothing runs here."""

from .actions import Action, ActionKind
from .automatic import Found, find_plan
from .catalog import SCHEDULES, build
from .costs import Costs
from .placement import Placement, looped, one_chunk, v_shape
from .plan import Plan, load
from .simulate import Simulation, TimelineEntry, simulate
from .validate import validate

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "Found",
    "Placement",
    "Plan",
    "Simulation",
    "TimelineEntry",
    "build",
    "find_plan",
    "load",
    "looped",
    "one_chunk",
    "simulate",
    "v_shape",
    "validate",
]
