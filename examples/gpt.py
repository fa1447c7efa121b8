"""A byte-level GPT: pre-norm blocks, learned positions, causal attention."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAPER: Final[dict[str, Any]] = {
    "vocab": 50257,
    "width": 1600,
    "depth": 48,
    "heads": 25,
    "length": 1024,
    "tied": True,
}
"""GPT-2 XL, 1.56 billion parameters (Radford et al., 2019)."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(batch, length, width)` to `(batch, heads, length, width / heads)`."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head self-attention over `(batch, length, width)`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a GELU MLP, each on a residual branch."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Token ids `(batch, length)` int64 to logits `(batch, length, vocab)`."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, length: int, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.length = length
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self._init_weights()

    def _init_weights(self) -> None:
        # GPT-2's: what is added to the residual stream starts smaller the deeper the model is.
        residual_std = 0.02 / (2 * len(self.blocks)) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=residual_std if name.endswith((".out", ".down")) else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(
    *,
    vocab: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    length: int = 128,
    dropout: float = 0.0,
    tied: bool = False,
) -> GPT:
    """A GPT of `depth` blocks. `tied=True` shares the embedding with the output head."""
    return GPT(vocab, width, depth, heads, length, dropout, tied)


def example_batch(model: GPT, *, batch: int = 4, seed: int = 0) -> tuple[tuple[Tensor], Tensor]:
    """Random tokens and the ones that follow them: `((x,), target)`, both `(batch, model.length)` int64 on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = torch.randint(model.vocab, (batch, model.length + 1), generator=generator, device="cpu")
    return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token, of logits `(batch, length, vocab)` against ids `(batch, length)`."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
