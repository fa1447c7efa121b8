"""Do two workers overlap? A two-stage step with two workers against the same plan's actions on one.

    python -m benchmarks.overlap [--repeats N] [--json FILE]

Both run the same compiled callables with one intra-op thread each; repetitions are interleaved; the ratio is that of medians. The
bound is (makespan of the plan) / (work of the plan) at the times measured for each action kind, 0.54 at equal ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from tabulate import tabulate

import twobp_fx
from examples import llama
from twobp_fx.schedules import Plan, build
from twobp_fx.schedules.order import execution_order

SIZES = {"width": 512, "depth": 4, "heads": 8, "hidden": 1408, "length": 128, "vocab": 256}
BATCH = 16


def serial(plan: Plan) -> Plan:
    """The same actions on one rank, in an order that respects their dependencies."""
    return Plan(f"{plan.name} on one worker", (tuple(action for _, action in execution_order(plan)),))


def measure(repeats: int, compiler: str = "inductor") -> dict[str, float]:
    """Median seconds of a step with two workers and with one, and their ratio."""
    torch.set_num_threads(1)
    model = llama.build(**SIZES)
    (x,), target = llama.example_batch(model, batch=BATCH)
    plan = build("1f1b-2", ranks=2)
    pipes = {
        name: twobp_fx.compile(model, stages=2, loss_fn=llama.loss_fn, schedule=each, compiler=compiler)
        for name, each in (("two", plan), ("one", serial(plan)))
    }
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for repeat in range(repeats + 2):
        for name, pipe in pipes.items():
            model.zero_grad()
            before = time.perf_counter()
            pipe.step(x, target=target)
            if repeat >= 2:  # the first compiles, the second warms up
                times[name].append(time.perf_counter() - before)
    two, one = statistics.median(times["two"]), statistics.median(times["one"])
    return {"two_workers": two, "one_worker": one, "ratio": two / one}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    result = measure(options.repeats)
    print(tabulate([[f"{result[k]:.3f}" for k in result]], headers=["two workers [s]", "one worker [s]", "ratio"]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
