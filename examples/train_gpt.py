"""Train a byte-level GPT on real text through a four-stage pipeline whose backward is split by twobp-fx.

    python -m examples.train_gpt [--steps N] [--compiler inductor|eager] [--schedule NAME]

The text is the Python standard library's own source, read as bytes: nothing is downloaded. The run prints what the split did, the
loss as it falls below that of guessing bytes by their frequency, the largest difference between the pipeline's gradients and those
of plain `loss.backward()`, and the time of a step with and without the split.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import nn

import twobp_fx
from examples import gpt, text
from twobp_fx.schedules import simulate

STAGES = 4
SIZES = {"width": 128, "depth": 8, "heads": 4, "length": 64, "vocab": 256}
BATCH = 16


def largest_difference(model: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int) -> float:
    """The largest difference between `model`'s gradients and plain autograd's on the same micro-batches, relative to the largest
    gradient of the parameter concerned.
    """
    reference = copy.deepcopy(model)
    reference.zero_grad()
    for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (gpt.loss_fn(reference(part), target) / microbatches).backward()
    worst = 0.0
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if parameter.grad is None or expected.grad is None:
            raise RuntimeError(f"no gradient for {name}")
        difference = (parameter.grad - expected.grad).abs().max() / expected.grad.abs().max()
        worst = max(worst, difference.item())
    return worst


def step_times(pipes: dict[str, twobp_fx.Pipe], x: torch.Tensor, y: torch.Tensor, repeats: int = 15) -> dict[str, float]:
    """Median seconds of a step of each pipe, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for repeat in range(repeats + 1):
        for name, pipe in pipes.items():
            pipe.zero_grad()
            before = time.perf_counter()
            pipe.step(x, target=y)
            if repeat:  # the first one compiles
                times[name].append(time.perf_counter() - before)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--schedule", default="1f1b-1")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = text.load()
    generator = torch.Generator().manual_seed(0)
    x, y = text.batches(data, BATCH, SIZES["length"], generator)
    model = gpt.build(**SIZES)
    entropy = text.unigram_entropy(data)

    microbatch = BATCH // STAGES
    pipe = twobp_fx.compile(
        model,
        stages=STAGES,
        loss_fn=gpt.loss_fn,
        schedule=options.schedule,
        compiler=options.compiler,
        example_args=(x[:microbatch],),
        example_kwargs={"target": y[:microbatch]},
    )
    print(f"A GPT of {sum(p.numel() for p in model.parameters()):,} parameters in {STAGES} stages, schedule {options.schedule}\n")
    twobp_fx.print_split(pipe)

    print("\nCompiling, then one step to compare gradients with plain loss.backward() ...")
    pipe.step(x, target=y)
    difference = largest_difference(model, x, y, pipe.plan.microbatches)
    print(f"Largest difference of any gradient, relative to its parameter's largest: {difference:.1e}\n")

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, options.steps + 1):
        x, y = text.batches(data, BATCH, SIZES["length"], generator)
        optimizer.zero_grad()
        loss = pipe.step(x, target=y)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % (options.steps // 6 or 1) == 0:
            print(f"step {step:4d}   loss {loss.item():.3f}   (bytes by frequency alone: {entropy:.3f})", flush=True)

    unsplit = twobp_fx.compile(
        model,
        stages=STAGES,
        loss_fn=gpt.loss_fn,
        schedule=options.schedule,
        compiler=options.compiler,
        split_backward=False,
    )
    times = step_times({"split": pipe, "unsplit": unsplit}, x, y)
    print(f"\nStep time: {times['split'] * 1e3:.0f} ms with the split, {times['unsplit'] * 1e3:.0f} ms without")
    bubbles = [simulate(each.plan).bubble_ratio for each in (pipe, unsplit)]
    print(
        f"Bubble at equal times: {bubbles[0]:.0%} with the split, {bubbles[1]:.0%} without. It shows where every rank has cores of "
        f"its own; here {STAGES} ranks share this machine's {torch.get_num_threads()}."
    )


if __name__ == "__main__":
    main()
