"""How parameter gradients get into `.grad`: summed up in buffers, and handed to autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

engine = torch.autograd.backward
"""Autograd's own, whatever takes its place later."""


def new_buffer(like: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape, strides, dtype and device of `like`."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which autograd keeps a parameter's gradient: its own, unless its `grad_dtype` says otherwise."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def accumulate(leaves: Sequence[torch.Tensor], compute: Callable[[], Sequence[torch.Tensor | None]]) -> None:
    """Have autograd accumulate into `.grad` of each leaf what `compute` returns for it; all hooks of theirs fire once.

    A gradient that nobody else refers to becomes the `.grad`, without a copy, if the leaf has none. For None nothing is added, but
    the hooks of the leaf's AccumulateGrad fire. Raises what `compute` and the hooks raise.
    """
    with torch.inference_mode(False), torch.enable_grad():
        engine(_Computed.apply(compute, *leaves))  # type: ignore[no-untyped-call]


class _Computed(torch.autograd.Function):
    """A node before the leaves whose backward computes their gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Sequence[torch.Tensor | None]], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.compute = compute
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.compute()


def sum_up(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of gradients, on the first one's device; empties `parts`, so that nobody else refers to it."""
    total = parts.pop(0)
    while parts:
        total.add_(parts.pop(0).to(total.device))
    return [total]
