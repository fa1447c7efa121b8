"""The base of every error this project raises at a user, and the errors of the graph passes."""

from __future__ import annotations


class TwobpError(Exception):
    """Base of all errors of twobp-fx. The message says what, where, and what to do."""


class CutError(TwobpError, ValueError):
    """The captured graph cannot be cut into the stages that were asked for."""


class SplitError(TwobpError):
    """A backward graph cannot be split into I and W without changing what it computes."""
