"""Profile the demo's GPT on this machine, rank all schedules for it by simulation, and check three of them against the clock.

    python -m benchmarks.rank_schedules [--ranks 2] [--microbatches 8] [--repeats 15] [--json FILE]

The stages are profiled one by one with one intra-op thread (`pipe.profile`), in turns with in-process steps of three schedules,
medians of both; every schedule of the catalog is simulated at these costs (`pipe.simulate`). In process a rank is a thread: the
comparison means something only while every rank has a core of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tabulate import tabulate

import twobp_fx
from benchmarks.timing import interleaved
from examples import gpt, text
from examples.train_gpt import SIZES
from twobp_fx.schedules import SCHEDULES, Costs

MEASURED = ("1f1b", "gpipe", "zb-h1")
MICROBATCH = 4


def candidates(ranks: int, microbatches: int) -> dict[str, twobp_fx.Pipe]:
    """The demo's model under every schedule that takes this many ranks and micro-batches, by name."""
    model = gpt.build(**{**SIZES, "width": 256, "length": 128})
    return {
        name: twobp_fx.compile(model, ranks * schedule.chunks, loss_fn=gpt.loss_fn, schedule=name, microbatches=microbatches)
        for name, schedule in SCHEDULES.items()
        if name != "naive" and (not schedule.fixed or schedule.microbatches(ranks) == microbatches)
    }


def measure(ranks: int, microbatches: int, repeats: int) -> list[dict[str, Any]]:
    """A row a schedule, best first: its name, simulated seconds, bubble and peak bytes, and the measured seconds of some."""
    torch.set_num_threads(1)
    pipes = candidates(ranks, microbatches)
    x, y = text.batches(text.load(), MICROBATCH * microbatches, 128, torch.Generator().manual_seed(0))
    profiled: dict[int, list[Costs]] = {pipe.plan.stages: [] for pipe in pipes.values()}
    sources = {pipe.plan.stages: pipe for pipe in pipes.values()}
    runs: dict[str, Callable[[], object]] = {
        name: functools.partial(pipes[name].step, x, target=y) for name in MEASURED if name in pipes
    }
    for stages, pipe in sources.items():
        runs[f"profile of {stages} stages"] = functools.partial(
            lambda stages, pipe: profiled[stages].append(pipe.profile(x, target=y, repeats=1)), stages, pipe
        )
    measured = interleaved(runs, repeats=repeats)
    costs = {stages: median_costs(each[2:]) for stages, each in profiled.items()}  # the first two warm up
    rows = []
    for name, pipe in pipes.items():
        found = pipe.simulate(costs=costs[pipe.plan.stages])
        rows.append(
            {
                "schedule": name,
                "simulated": found.makespan,
                "bubble": found.bubble_ratio,
                "peak_bytes": max(found.peak_memory),
                "measured": measured.get(name),
            }
        )
    return sorted(rows, key=lambda row: float(row["simulated"]))


def median_costs(profiles: Sequence[Costs]) -> Costs:
    """The median over profiles of each stage's F, I, W and B."""

    def median(field: str) -> list[float]:
        return [statistics.median(stage) for stage in zip(*(getattr(each, field) for each in profiles), strict=True)]

    return replace(profiles[0], **{field: median(field) for field in ("forward", "backward_input", "backward_weight", "backward")})


def main() -> None:
    """Profile, rank, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows = measure(options.ranks, options.microbatches, options.repeats)
    table = [
        [
            row["schedule"],
            f"{row['simulated'] * 1e3:.1f} ms",
            f"{row['bubble']:.1%}",
            f"{row['peak_bytes'] / 2**20:.1f} MiB",
            "" if row["measured"] is None else f"{row['measured'] * 1e3:.1f} ms",
            "" if row["measured"] is None else f"{row['measured'] / row['simulated']:.3f}",
        ]
        for row in rows
    ]
    print(tabulate(table, headers=["schedule", "simulated step", "bubble", "peak memory", "measured step", "measured / simulated"]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
