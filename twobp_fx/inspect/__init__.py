"""What the compiler did, made visible: tables for people, plain data for programs."""

from .describe import describe_split
from .printer import print_plan, print_split

__all__ = ["describe_split", "print_plan", "print_split"]
