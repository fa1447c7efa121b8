"""What the compiler did, made visible: tables for people, plain data for programs."""

from .describe import describe_split
from .printer import print_split
from .timeline import print_plan

__all__ = ["describe_split", "print_plan", "print_split"]
