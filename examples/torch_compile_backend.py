"""Put weight gradients off by hand, in a model compiled with `torch.compile(..., backend="twobp")`.

    python -m examples.torch_compile_backend [--steps N] [--compiler inductor|eager]

A byte-level GPT on real text, as two modules one after the other: the two stages of a pipeline, here in one process. First, a plain
backward: the largest difference of its gradients from eager's. Then the second stage's backward runs as I alone, the first stage
gets its gradient at once, and the W's of both run after that, where a pipeline would have nothing else to do.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import twobp_fx
from examples import gpt, text

BATCH, LENGTH = 16, 64


class Front(nn.Module):
    """The embeddings and the first half of the blocks."""

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.blocks = nn.Sequential(*model.blocks[: len(model.blocks) // 2])

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return x


class Back(nn.Module):
    """The other half, and the loss."""

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*model.blocks[len(model.blocks) // 2 :])
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return gpt.loss_fn(self.head(self.norm(self.blocks(x))), target)


def largest_difference(model: nn.Module, expected: nn.Module) -> float:
    """Of any gradient of the one from the other's, relative to the largest gradient of the parameter concerned."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = text.load()
    x, y = text.batches(data, BATCH, LENGTH, torch.Generator().manual_seed(0))
    model = gpt.build(width=options.width, depth=options.depth, length=LENGTH)
    eager = copy.deepcopy(model)
    front, back = (
        torch.compile(stage, backend="twobp", options={"compiler": options.compiler}) for stage in (Front(model), Back(model))
    )

    back(front(x), y).backward()  # as ever: every gradient is there
    gpt.loss_fn(eager(x), y).backward()
    print(f"Largest difference of any gradient from eager's, relative: {largest_difference(model, eager):.1e}\n")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, options.steps + 1):
        x, y = text.batches(data, BATCH, LENGTH, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        activation = front(x)
        received = activation.detach().requires_grad_()  # what the second stage is sent
        loss = back(received, y)
        with twobp_fx.defer_weight_grads() as pending:
            loss.backward()  # I of the second stage: no parameter has a gradient yet, `received` has
            activation.backward(received.grad)  # I of the first: empty, it only hands its W over
        if step == 1:
            print(f"{pending}\n")
        pending.run()  # both W's; hooks of parameters fire now
        optimizer.step()
        if step == 1 or step % (options.steps // 5 or 1) == 0:
            print(f"step {step:4d}   loss {loss.item():.3f}   (bytes by frequency alone: {text.unigram_entropy(data):.3f})")


if __name__ == "__main__":
    main()
