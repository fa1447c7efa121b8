"""Profile the demo's GPT on this machine, rank all schedules for it by simulation, and check three of them against the clock.

    python -m benchmarks.rank_schedules [--ranks 2] [--microbatches 8] [--repeats 15] [--json FILE]

The stages are profiled one by one with one intra-op thread (`pipe.profile`), every schedule of the catalog is simulated at these
costs (`pipe.simulate`), and the step of three is measured in process, repetitions interleaved, medians. In process a rank is a
thread: the comparison means something only while every rank has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from tabulate import tabulate

import twobp_fx
from examples import gpt, text
from examples.train_gpt import SIZES
from twobp_fx.schedules import SCHEDULES, Simulation

MEASURED = ("1f1b", "gpipe", "zb-h1")
MICROBATCH = 4


def profile_and_rank(ranks: int, microbatches: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, twobp_fx.Pipe]]:
    """A row a schedule (name, simulated seconds, bubble, peak bytes), best first; and the pipes of those to measure."""
    torch.set_num_threads(1)
    model = gpt.build(**{**SIZES, "width": 256, "length": 128})
    x, y = batch(microbatches)
    costs: dict[int, Any] = {}
    rows: list[dict[str, Any]] = []
    pipes: dict[str, twobp_fx.Pipe] = {}
    for name, schedule in SCHEDULES.items():
        if name == "naive" or (schedule.fixed and schedule.microbatches(ranks) != microbatches):
            continue
        stages = ranks * schedule.chunks
        pipe = twobp_fx.compile(model, stages, loss_fn=gpt.loss_fn, schedule=name, microbatches=microbatches)
        if stages not in costs:
            costs[stages] = pipe.profile(x, target=y, repeats=repeats)
        found: Simulation = pipe.simulate(costs=costs[stages])
        rows.append(
            {"schedule": name, "simulated": found.makespan, "bubble": found.bubble_ratio, "peak_bytes": max(found.peak_memory)}
        )
        if name in MEASURED:
            pipes[name] = pipe
    return sorted(rows, key=lambda row: float(row["simulated"])), pipes


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real text for one step."""
    return text.batches(text.load(), MICROBATCH * microbatches, 128, torch.Generator().manual_seed(0))


def measure(pipes: dict[str, twobp_fx.Pipe], microbatches: int, repeats: int) -> dict[str, float]:
    """Median seconds of a step of each pipe."""
    x, y = batch(microbatches)
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for repeat in range(repeats + 2):
        for name, pipe in pipes.items():
            pipe.zero_grad()
            before = time.perf_counter()
            pipe.step(x, target=y)
            if repeat > 1:
                times[name].append(time.perf_counter() - before)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Profile, rank, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows, pipes = profile_and_rank(options.ranks, options.microbatches, options.repeats)
    measured = measure(pipes, options.microbatches, options.repeats)
    for row in rows:
        row["measured"] = measured.get(row["schedule"])
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
