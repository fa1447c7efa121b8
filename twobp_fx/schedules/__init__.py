"""Pipeline plans: made, checked, simulated, and kept as torch's compute-only CSV. Pure planning: nothing runs here."""

from .actions import Action, ActionKind
from .catalog import SCHEDULES, build
from .plan import Plan, load
from .simulate import Costs, Simulation, TimelineEntry, simulate
from .validate import validate

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "Plan",
    "Simulation",
    "TimelineEntry",
    "build",
    "load",
    "simulate",
    "validate",
]
