"""Mamba: a stack of selective state-space blocks (arXiv 2312.00752), with the scan in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAPER: Final[dict[str, Any]] = {
    "vocab": 50_280,
    "width": 2048,
    "depth": 48,
    "state": 16,
    "conv": 4,
    "expand": 2,
    "length": 1024,
}
"""Mamba-1.4b. The output head has its own weight here, which adds 0.1 billion parameters."""


def linear_scan(decay: Tensor, value: Tensor) -> Tensor:
    """Every h of the recurrence `h[t] = decay[t] * h[t - 1] + value[t]`, `h[-1] = 0`, along dimension 1.

    `decay` and `value` have the same shape, `(batch, length, ...)`, and dtype; so has the result.

    Two steps in a row are one step of the same form, so the odd positions are a scan of half the length; the even ones
    follow from their neighbours (Blelloch, "Prefix sums and their applications", 1990). A graph of it has a few nodes
    for each of log2(length) levels, and it touches a small multiple of the input's memory. It only multiplies and adds:
    no division by a decayed product and no logarithm, so a decay of 0 is as exact as any other, gradients included.
    """
    length = value.shape[1]
    if length == 1:
        return value
    if length % 2:
        end = (0, 0) * (value.dim() - 2) + (0, 1)
        return linear_scan(F.pad(decay, end), F.pad(value, end))[:, :length]
    even_decay, odd_decay = torch.unflatten(decay, 1, (-1, 2)).unbind(2)
    even_value, odd_value = torch.unflatten(value, 1, (-1, 2)).unbind(2)
    odd = linear_scan(odd_decay * even_decay, odd_decay * even_value + odd_value)
    start = (0, 0) * (value.dim() - 2) + (1, -1)
    even = even_decay * F.pad(odd, start) + even_value  # the pad shifts by one: each even position's predecessor
    return torch.stack((even, odd), dim=2).flatten(1, 2)


def selective_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The state-space model, discretized as in Mamba: `h[t] = exp(delta[t] a) h[t-1] + delta[t] b[t] x[t]`, `y = c h`.

    `x`, the input, and `delta`, the positive step sizes, are `(batch, length, channels)`, and so is the result.
    `a`, the negative diagonal of the state matrix, is `(channels, state)`. `b` and `c`, the weights of the state's
    input and output, are `(batch, length, state)`.
    """
    decay = torch.exp(delta.unsqueeze(-1) * a)
    value = (delta * x).unsqueeze(-1) * b.unsqueeze(-2)
    return (linear_scan(decay, value) @ c.unsqueeze(-1)).squeeze(-1)


class Mixer(nn.Module):
    """The Mamba layer: causal depthwise convolution, selective scan, output gate, over `(batch, length, width)`."""

    def __init__(self, width: int, state: int, conv: int, expand: int) -> None:
        super().__init__()
        inner = expand * width
        rank = math.ceil(width / 16)
        self.sizes = [rank, state, state]
        self.project_in = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, conv, groups=inner, padding=conv - 1)
        self.select = nn.Linear(inner, sum(self.sizes), bias=False)
        self.project_delta = nn.Linear(rank, inner)
        self.log_a = nn.Parameter(torch.arange(1.0, state + 1.0).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.project_out = nn.Linear(inner, width, bias=False)
        with torch.no_grad():  # Mamba's start: step sizes spread evenly over the decades from 0.001 to 0.1
            delta = torch.empty(inner).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.project_delta.bias.copy_(delta.expm1().log())  # softplus's inverse
            nn.init.uniform_(self.project_delta.weight, -(rank**-0.5), rank**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.project_in(x).chunk(2, dim=-1)
        # The padding is on both sides; keeping the first `length` outputs makes the convolution causal.
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        delta, b, c = self.select(x).split(self.sizes, dim=-1)
        delta = F.softplus(self.project_delta(delta))
        # A product of many decays near 1 needs float32 at least.
        wide = torch.promote_types(x.dtype, torch.float32)
        y = selective_scan(x.to(wide), delta.to(wide), -self.log_a.to(wide).exp(), b.to(wide), c.to(wide)).to(x.dtype)
        out: Tensor = self.project_out((y + self.skip * x) * F.silu(gate))
        return out


class Block(nn.Module):
    """One Mamba layer on a pre-norm residual branch."""

    def __init__(self, width: int, state: int, conv: int, expand: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.mixer = Mixer(width, state, conv, expand)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixer(self.norm(x))
        return out


class Mamba(nn.Module):
    """Token ids `(batch, length)` int64 to logits `(batch, length, vocab)`."""

    def __init__(self, vocab: int, width: int, depth: int, state: int, conv: int, expand: int, length: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.length = length
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, state, conv, expand) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(
    *,
    vocab: int = 256,
    width: int = 128,
    depth: int = 4,
    state: int = 16,
    conv: int = 4,
    expand: int = 2,
    length: int = 64,
) -> Mamba:
    """A Mamba of `depth` blocks; `state` is for each of `expand * width` channels. `length` only sizes the batch."""
    return Mamba(vocab, width, depth, state, conv, expand, length)


def example_batch(model: Mamba, *, batch: int = 4, seed: int = 0) -> tuple[tuple[Tensor], Tensor]:
    """Random tokens and the ones that follow them: `((x,), target)`, both `(batch, model.length)` int64 on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = torch.randint(model.vocab, (batch, model.length + 1), generator=generator, device="cpu")
    return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token, of logits `(batch, length, vocab)` against ids `(batch, length)`."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
