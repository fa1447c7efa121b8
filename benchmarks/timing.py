"""Timing on a machine that is never quite quiet: what is compared runs in turns, and medians are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(functions: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2) -> dict[str, float]:
    """Median seconds of each function over `repeats` rounds, each round calling all of them in order, after `warmup` rounds."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + warmup):
        for name, function in functions.items():
            before = time.perf_counter()
            function()
            if repeat >= warmup:
                times[name].append(time.perf_counter() - before)
    return {name: statistics.median(each) for name, each in times.items()}
