"""How capture and split scale: a LLaMa-like model on the meta device, in 4 stages, at 8 to 64 layers of the 7-billion one's width.

    python -m benchmarks.capture_scale [--layers 8 16 32 64] [--json FILE]

Each size runs in a process of its own, so that its peak resident memory is its own. `exponent` is how CPU time grows from the first
size to this one: log(time ratio) / log(layer ratio); 1 is linear. 32 layers are the 7-billion-parameter model of the 2BP paper.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time

import torch
from tabulate import tabulate

STAGES = 4
LAYERS = (8, 16, 32, 64)


def measure(layers: int) -> dict[str, float]:
    """Capture and split one size; seconds, and bytes of peak resident memory of this process."""
    import twobp_fx
    from examples import llama

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = llama.build(**{**llama.PAPER, "depth": layers})
    args, target = llama.example_batch(model, batch=1)
    example = {"target": target.to("meta")}
    before, busy_before = time.perf_counter(), time.process_time()
    pipe = twobp_fx.compile(
        model,
        stages=STAGES,
        loss_fn=llama.loss_fn,
        example_args=tuple(arg.to("meta") for arg in args),
        example_kwargs=example,
        compiler="eager",
    )
    seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - busy_before
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": sum(len(graph.graph.nodes) for stage in pipe.stages for _, graph in stage.graphs.items()),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Measure every size in a fresh process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for layers in options.layers:
        command = [sys.executable, "-m", "benchmarks.capture_scale", "--one", str(layers)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    first = rows[0]
    for row in rows:
        growth = math.log(row["layers"] / first["layers"])
        row["exponent"] = math.log(row["cpu_seconds"] / first["cpu_seconds"]) / growth if growth else math.nan
    table = [
        [
            row["layers"],
            f"{row['parameters'] / 1e9:.2f} billion",
            row["nodes"],
            f"{row['seconds']:.1f} s",
            f"{row['cpu_seconds']:.1f} s",
            f"{row['peak_bytes'] / 2**30:.2f} GiB",
            "" if math.isnan(row["exponent"]) else f"{row['exponent']:.2f}",
        ]
        for row in rows
    ]
    print(
        tabulate(
            table, headers=["layers", "parameters", "graph nodes", "capture and split", "of it CPU", "peak memory", "exponent"]
        )
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
