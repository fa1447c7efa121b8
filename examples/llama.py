"""The LLaMa-like transformer of the 2BP paper: RMSNorm, rotary positions, SwiGLU, causal attention."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAPER: Final[dict[str, Any]] = {
    "vocab": 32_000,
    "width": 4096,
    "hidden": 11_008,
    "depth": 32,
    "heads": 32,
    "length": 1024,
}
"""Transformer-7b of arXiv 2405.18047, 6.7 billion parameters. The paper leaves `hidden` open; 11008 is LLaMa's."""


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of `x`, `(batch, heads, length, head_dim)`.

    Channel i of the first half and channel i of the second half are a pair, turned by the angle
    `position * base**(-2i / head_dim)`.
    """
    length, head_dim = x.shape[-2:]
    # The angles are computed here, not kept in a buffer or handed from block to block: they cost little, and a cut
    # between any two blocks then carries the hidden state alone. float32, because half precision miscounts positions.
    frequency = base ** (-torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / head_dim)
    angle = torch.arange(length, device=x.device, dtype=torch.float32).unsqueeze(-1) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(batch, length, width)` to `(batch, heads, length, width / heads)`."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions over `(batch, length, width)`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = rotate(split_heads(self.query(x), self.heads))
        k = rotate(split_heads(self.key(x), self.heads))
        v = split_heads(self.value(x), self.heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """The gated MLP of arXiv 2002.05202."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm block: attention, then SwiGLU, each on a residual branch."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    """Token ids `(batch, length)` int64 to logits `(batch, length, vocab)`."""

    def __init__(self, vocab: int, width: int, hidden: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.length = length
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(*, vocab: int = 256, width: int = 128, hidden: int = 344, depth: int = 4, heads: int = 4, length: int = 128) -> Llama:
    """A LLaMa-like model of `depth` blocks; `hidden` is the MLP's inner width. `length` only sizes the batch."""
    return Llama(vocab, width, hidden, depth, heads, length)


def example_batch(model: Llama, *, batch: int = 4, seed: int = 0) -> tuple[tuple[Tensor], Tensor]:
    """Random tokens and the ones that follow them: `((x,), target)`, both `(batch, model.length)` int64 on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = torch.randint(model.vocab, (batch, model.length + 1), generator=generator, device="cpu")
    return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token, of logits `(batch, length, vocab)` against ids `(batch, length)`."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
