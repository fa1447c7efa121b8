"""Helpers of the tests of pipes: small models, a pipe of one, and what a plain training loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import twobp_fx

WIDTH = 6


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh(), linear())


def make_pipe(model: Any, stages: Any = 2, **options: Any) -> twobp_fx.api.Pipe:
    return twobp_fx.compile(model, stages, **{"compiler": "eager", **options})


class Between(nn.Module):
    """linear, then a function of this module and the activation, then linear."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], *extra: nn.Module, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.extra = nn.ModuleList(extra)
        self.function = function
        self.register_buffer("state", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


# The reference: what a plain training loop with gradient accumulation does.


def microbatches_of(tree: Any, count: int) -> list[Any]:
    """Slices along dimension 0 of every tensor that is larger than 1 there; everything else goes whole to each."""

    def part(leaf: Any, i: int) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.size(0) == 1:
            return leaf
        return leaf.chunk(count)[i]

    return [pytree.tree_map(lambda leaf, i=i: part(leaf, i), tree) for i in range(count)]


def plain_step(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    count: int = 2,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Accumulates mean gradients in `model` itself; returns the mean loss."""
    losses = []
    for a, k, t in microbatches_of((args, kwargs, target), count):
        result = model(*a, **k)
        if loss_fn is not None:
            result = loss_fn(result, t)
        elif not isinstance(result, Tensor):
            result = result["loss"] if isinstance(result, dict) else result.loss
        (result / count).backward()
        losses.append(result.detach())
    return torch.stack(losses).mean()


def assert_same_state(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """Gradients and buffers of the one are those of the other; None is only equal to None."""
    for (name, p), (_, q) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}: {'None' if p.grad is None else 'a gradient'}, unlike eager"
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"gradient of {n}: {m}", **tolerance)
    for (name, b), (_, c) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(b, c, msg=lambda m, n=name: f"buffer {n}: {m}", **tolerance)
