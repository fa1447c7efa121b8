"""What the split costs: F, B, I and W of one stage of each of the paper's families, against torch's own halves.

    python -m benchmarks.split_cost [--quick] [--repeats 15] [--only llama ...] [--json FILE]

One process, one thread. A stage is two blocks; what is compared runs in turns on the same inputs, and the ratios are medians of the
rounds' ratios. Every backward ends with its gradients added into `.grad`, which exists already. Rows: torch's eager stage (whole,
and in the halves of torch.distributed.pipelining), torch.compile with Inductor, and ours behind `torch.compile(backend="twobp")`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import twobp_fx
from examples import bert, llama, mamba, resnet


class WithoutMask(nn.Module):
    """A BERT block as one that takes the hidden state alone."""

    def __init__(self, block: bert.Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, None)
        return out


Stage = tuple[nn.Module, tuple[int, ...]]
"""A module, and the shape of its input."""
STAGES: dict[str, Callable[[], Stage]] = {
    "LLaMa-like, width 512, 256 tokens": lambda: (
        nn.Sequential(*(llama.Block(512, 1408, 8) for _ in range(2))),
        (2, 128, 512),
    ),
    "LLaMa-like, width 1024, 64 tokens": lambda: (
        nn.Sequential(*(llama.Block(1024, 2816, 16) for _ in range(2))),
        (1, 64, 1024),
    ),
    "BERT, width 512, 256 tokens": lambda: (
        nn.Sequential(*(WithoutMask(bert.Block(512, 8)) for _ in range(2))),
        (2, 128, 512),
    ),
    "BERT, width 1024, 64 tokens": lambda: (
        nn.Sequential(*(WithoutMask(bert.Block(1024, 16)) for _ in range(2))),
        (1, 64, 1024),
    ),
    "Mamba, width 256, 128 tokens": lambda: (nn.Sequential(*(mamba.Block(256, 16, 4, 2) for _ in range(2))), (2, 64, 256)),
    "Mamba, width 512, 64 tokens": lambda: (nn.Sequential(*(mamba.Block(512, 16, 4, 2) for _ in range(2))), (1, 64, 512)),
    "ResNet, width 64, 28 by 28": lambda: (nn.Sequential(*(resnet.Bottleneck(256, 64, 1) for _ in range(2))), (4, 256, 28, 28)),
    "ResNet, width 128, 14 by 14": lambda: (nn.Sequential(*(resnet.Bottleneck(512, 128, 1) for _ in range(2))), (4, 512, 14, 14)),
}
QUICK = ("LLaMa-like, width 512, 256 tokens",)


class Eager:
    """torch's stage as it is, with the halves of torch.distributed.pipelining."""

    def __init__(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        self.module = module
        self.call: Callable[[Tensor], Tensor] = module
        self.x = x
        self.gradient = gradient

    def forward(self) -> None:
        self.taken = self.x.clone().requires_grad_()
        self.out = self.call(self.taken)

    def whole(self) -> None:
        self.out.backward(self.gradient)

    def first(self) -> None:
        _, self.groups = stage_backward_input([self.out], [self.gradient], [self.taken], self.module.parameters())

    def second(self) -> None:
        stage_backward_weight(self.module.parameters(), self.groups)


class Compiled(Eager):
    """torch.compile with Inductor: it has no halves."""

    def __init__(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        super().__init__(module, x, gradient)
        self.call = torch.compile(module)


class Ours(Eager):
    """torch.compile with our backend."""

    def __init__(self, module: nn.Module, x: Tensor, gradient: Tensor) -> None:
        super().__init__(module, x, gradient)
        self.call = torch.compile(module, backend="twobp")

    def first(self) -> None:
        with twobp_fx.defer_weight_grads() as self.pending:
            self.out.backward(self.gradient)

    def second(self) -> None:
        self.pending.run()


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).sum()


KINDS: dict[str, type[Eager]] = {"eager": Eager, "compiled": Compiled, "ours": Ours}


def measure(name: str, repeats: int, warmup: int = 3) -> dict[str, Any]:
    """The times of one stage's parts, in seconds, and the ratios; medians over rounds."""
    torch._dynamo.reset()  # or the sizes would become symbolic after the first stage of a family
    torch.manual_seed(0)
    module, shape = STAGES[name]()
    x, gradient = torch.randn(shape), torch.randn(shape)
    runs = {kind: make(copy.deepcopy(module), x, gradient) for kind, make in KINDS.items()}
    rounds = [one_round(runs) for _ in range(repeats + warmup)][warmup:]
    pipe = twobp_fx.compile(copy.deepcopy(module), 1, loss_fn=_loss, example_args=(x,), example_kwargs={"target": gradient})
    found: dict[str, Any] = {"stage": name}
    for part in rounds[0]:
        found[part] = statistics.median(each[part] for each in rounds)
    for ratio, (above, below) in RATIOS.items():
        found[ratio] = statistics.median(sum(each[p] for p in above) / each[below] for each in rounds)
    memory = pipe.stages[0].memory
    found |= {"saved": memory.saved, "freed": memory.freed_after_input, "held": memory.held_for_weight}
    return found


RATIOS = {
    "ours, B / compiled B": (("ours B",), "compiled B"),
    "ours, (I+W) / own B": (("ours I", "ours W"), "ours B"),
    "ours, (I+W) / compiled B": (("ours I", "ours W"), "compiled B"),
    "eager, (I+W) / own B": (("eager I", "eager W"), "eager B"),
    "ours, F / compiled F": (("ours F",), "compiled F"),
}


def one_round(runs: dict[str, Eager]) -> dict[str, float]:
    """Seconds of each part of each kind, run once."""
    found: dict[str, float] = {}

    def clock(name: str, function: Callable[[], None]) -> None:
        before = time.perf_counter()
        function()
        found[name] = time.perf_counter() - before

    for kind, run in runs.items():
        clock(f"{kind} F", run.forward)
        clock(f"{kind} B", run.whole)
    for kind, run in runs.items():
        if not isinstance(run, Compiled):
            run.forward()
            clock(f"{kind} I", run.first)
            clock(f"{kind} W", run.second)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one stage, three rounds: to see that it runs")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[], help="stages whose names begin with one of these")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in STAGES if not options.only or name.startswith(tuple(options.only))]
    rows = [measure(name, 3 if options.quick else options.repeats) for name in (QUICK if options.quick else names)]
    parts = [part for part in rows[0] if part[-1] in "FBIW" and "/" not in part]
    milliseconds = [[row["stage"], *(f"{row[part] * 1e3:.1f}" for part in parts)] for row in rows]
    print(tabulate(milliseconds, headers=["milliseconds", *parts], disable_numparse=True))
    print()
    print(tabulate([[row["stage"], *(f"{row[ratio]:.3f}" for ratio in RATIOS)] for row in rows], headers=["", *RATIOS]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
