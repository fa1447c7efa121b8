"""Running graphs that were traced with their casts in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def as_traced(devices: Iterable[torch.device]) -> Iterator[None]:
    """No autocast of the caller's on `devices` and the CPU: the graphs hold the casts that it made when they were traced."""
    kinds = {"cpu", *(device.type for device in devices)} - {"meta"}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
