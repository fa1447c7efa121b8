"""Do two workers overlap? A two-stage step with two workers against the same plan's actions on one.

    python -m benchmarks.overlap [--repeats N] [--json FILE]

Both run the same compiled callables with one intra-op thread each; repetitions are interleaved; the ratio is that of medians.
Beside it stands what it would be if the two workers never slowed each other down: the plan's simulated makespan over its work, at
the times that `pipe.profile` measures for each action. It is 0.54 at equal times; here the first stage has no input gradient, so
that all of its backward waits for the end of the step.
"""

from __future__ import annotations

import argparse
import functools
import json

import torch
from tabulate import tabulate

import twobp_fx
from benchmarks.timing import interleaved
from examples import llama
from twobp_fx.schedules import Plan, build
from twobp_fx.schedules.order import execution_order

SIZES = {"width": 512, "depth": 4, "heads": 8, "hidden": 1408, "length": 128, "vocab": 256}
BATCH = 16


def serial(plan: Plan) -> Plan:
    """The same actions on one rank, in an order that respects their dependencies."""
    return Plan(f"{plan.name} on one worker", (tuple(action for _, action in execution_order(plan)),))


def measure(repeats: int, compiler: str = "inductor") -> dict[str, float]:
    """Median seconds of a step with two workers and with one, their ratio, and that of the simulated plan."""
    torch.set_num_threads(1)
    model = llama.build(**SIZES)
    (x,), target = llama.example_batch(model, batch=BATCH)
    plan = build("1f1b-2", ranks=2)
    pipes = {
        name: twobp_fx.compile(model, stages=2, loss_fn=llama.loss_fn, schedule=each, compiler=compiler)
        for name, each in (("two", plan), ("one", serial(plan)))
    }
    seconds = interleaved({name: functools.partial(pipe.step, x, target=target) for name, pipe in pipes.items()}, repeats=repeats)
    two, one = seconds["two"], seconds["one"]
    costs = pipes["two"].profile(x, target=target, repeats=repeats)
    simulated = {name: pipe.simulate(costs=costs).makespan for name, pipe in pipes.items()}
    return {"two_workers": two, "one_worker": one, "ratio": two / one, "simulated": simulated["two"] / simulated["one"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    result = measure(options.repeats)
    print(tabulate([[f"{result[k]:.3f}" for k in result]], headers=["two workers [s]", "one worker [s]", "ratio", "simulated"]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
