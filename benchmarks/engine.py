"""Our stage against torch's own in torch.distributed.pipelining: the time of a step on two ranks.

    python -m benchmarks.engine [--microbatches 2 4 8 16] [--repeats 15] [--json FILE]

Two processes over gloo, one thread each; each holds two LLaMa-like blocks (and the embedding, or the head and the loss). All rows
run the same model and the same micro-batches in turns, a barrier before and after each step; medians, and half the distance between
the quartiles. The limit is what no schedule can go below without making the work itself cheaper: each rank runs its own share,
unsplit and compiled by Inductor, and waits for nobody.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleavedZeroBubble

import twobp_fx
from examples import llama

RANKS = 2
SIZES = {"width": 512, "hidden": 1408, "heads": 8, "length": 128, "vocab": 256}
MICROBATCH = 2
"""Sequences; 256 tokens."""
LIMIT = "no-bubble limit"
TORCH = {
    "torch 1F1B, eager": (Schedule1F1B, "eager"),
    "torch 1F1B, compiled": (Schedule1F1B, "in place"),
    "torch zero bubble, eager": (ScheduleInterleavedZeroBubble, "eager"),
    "torch zero bubble, compiled in place": (ScheduleInterleavedZeroBubble, "in place"),
}
OURS = {
    "twobp 1F1B": (Schedule1F1B, "twobp"),
    "twobp zero bubble": (ScheduleInterleavedZeroBubble, "twobp"),
}


class Share(nn.Module):
    """One rank's part of the model: its blocks, and what stands before the first and after the last one."""

    def __init__(self, model: llama.Llama, rank: int) -> None:
        super().__init__()
        own = len(model.blocks) // RANKS
        self.tokens = model.tokens if rank == 0 else nn.Identity()
        self.blocks = nn.ModuleList(model.blocks[rank * own : (rank + 1) * own])
        last = rank == RANKS - 1
        self.norm: nn.Module = model.norm if last else nn.Identity()
        self.head: nn.Module = model.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def run_rank(rank: int, store: str, microbatches: list[int], repeats: int, results: Any) -> None:
    """One process. Rank 0 puts {micro-batches: {row: seconds of each repetition}} into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    share = Share(llama.build(depth=2 * RANKS, **SIZES), rank)
    found = {count: time_steps(rows(rank, share, count), repeats) for count in microbatches}
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def rows(rank: int, share: Share, microbatches: int) -> dict[str, tuple[nn.Module, Callable[[], Any]]]:
    """For each row its module and a function that runs one step."""
    x, target = batch(microbatches)
    given = {"args": (x,) if rank == 0 else (), "kwargs": {"target": target} if rank == RANKS - 1 else {}}
    found: dict[str, tuple[nn.Module, Callable[[], Any]]] = {}
    alone = copy.deepcopy(share)
    alone.compile()
    found[LIMIT] = (alone, functools.partial(run_alone, rank, alone, x, target, microbatches))
    for name, (schedule, how) in {**TORCH, **OURS}.items():
        module = copy.deepcopy(share)
        if how == "in place":
            module.compile()
        kind = twobp_fx.PipelineStage if how == "twobp" else PipelineStage
        stage = kind(module, rank, RANKS, torch.device("cpu"))
        engine: Any = schedule
        runs = engine(stage if schedule is Schedule1F1B else [stage], microbatches, loss_fn=llama.loss_fn)
        step = functools.partial(runs.step, *given["args"], **given["kwargs"])
        if how == "in place" and schedule is ScheduleInterleavedZeroBubble:
            # It runs each backward twice, and without this refuses to.
            step = functorch_config.patch(donated_buffer=False)(step)
        found[name] = (module, step)
    return found


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets for one step, `(micro-batches * MICROBATCH, length)`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZES["vocab"], (microbatches * MICROBATCH, SIZES["length"] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_alone(rank: int, module: nn.Module, x: Tensor, target: Tensor, microbatches: int) -> None:
    """A rank's share of a step, with made-up activations and gradients in place of the neighbour's."""
    hidden = torch.ones(MICROBATCH, SIZES["length"], SIZES["width"])
    for tokens, following in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        if rank == 0:
            module(tokens).backward(hidden)
        else:
            llama.loss_fn(module(hidden.clone().requires_grad_()), following).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(microbatches)


def time_steps(runs: dict[str, tuple[nn.Module, Callable[[], Any]]], repeats: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of every step of every row, in turns; each ends when both ranks are done."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + warmup):
        for name, (module, step) in runs.items():
            module.zero_grad()
            dist.barrier()
            before = time.perf_counter()
            step()
            dist.barrier()
            if repeat >= warmup:
                times[name].append(time.perf_counter() - before)
    return times


def summary(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row each: median, spread, ratio to the limit and to the best of torch's rows."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min(medians[name] for name in TORCH)
    found = []
    for name, each in times.items():
        low, _, high = statistics.quantiles(each, n=4)
        found.append(
            {
                "row": name,
                "seconds": medians[name],
                "spread": (high - low) / 2,
                "to_limit": medians[name] / medians[LIMIT],
                "to_best_torch": medians[name] / best,
            }
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store", options.microbatches, options.repeats, results), nprocs=RANKS)  # type: ignore[no-untyped-call]
    found = {count: summary(times) for count, times in results.get().items()}
    for count, table in found.items():
        print(f"\n{count} micro-batches")
        cells = [
            [
                row["row"],
                f"{row['seconds'] * 1e3:.1f} ms",
                f"{row['spread'] * 1e3:.1f}",
                f"{row['to_limit']:.3f}",
                f"{row['to_best_torch']:.3f}",
            ]
            for row in table
        ]
        print(tabulate(cells, headers=["", "step", "+-", "to the limit", "to torch's best"]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
