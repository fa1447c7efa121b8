"""BERT: a post-norm bidirectional encoder with a masked-language-model head (arXiv 1810.04805).

Left out: segment embeddings and next-sentence prediction, which masked-language-model training alone does not use.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAPER: Final[dict[str, Any]] = {
    "vocab": 30_522,
    "width": 1024,
    "depth": 24,
    "heads": 16,
    "length": 512,
    "tied": True,
}
"""BERT-Large, 0.34 billion parameters. `tied=True` is BERT's; the embedding then lives in the first and last stage."""

IGNORED: Final = -100
"""The target of a token that was not masked: `loss_fn` skips it."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`(batch, length, width)` to `(batch, heads, length, width / heads)`."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention over `(batch, length, width)`; `mask`, if given, is true where a key may be seen."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """One post-norm block: attention, then a GELU MLP, each normalized after its residual sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        out: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return out


class Embedding(nn.Module):
    """Token plus position embedding, normalized."""

    def __init__(self, vocab: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.norm(self.tokens(tokens) + self.positions(positions))
        return out


class Head(nn.Module):
    """The masked-language-model head: a transform, then logits over the vocabulary."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(F.gelu(self.transform(x))))
        return logits


class Bert(nn.Module):
    """Token ids `(batch, length)` int64 to logits `(batch, length, vocab)`."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, length: int, tied: bool) -> None:
        super().__init__()
        self.vocab = vocab
        self.length = length
        self.embedding = Embedding(vocab, width, length)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = Head(vocab, width)
        if tied:
            self.head.decoder.weight = self.embedding.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`attention_mask`, `(batch, length)`: nonzero or true at real tokens, zero at padding. None: no padding."""
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


def build(*, vocab: int = 256, width: int = 128, depth: int = 4, heads: int = 4, length: int = 128, tied: bool = False) -> Bert:
    """A BERT of `depth` blocks. `tied=True` shares the token embedding with the head's decoder."""
    return Bert(vocab, width, depth, heads, length, tied)


def example_batch(model: Bert, *, batch: int = 4, seed: int = 0) -> tuple[tuple[Tensor], Tensor]:
    """Random tokens with 15 % masked: `((x,), target)`, both `(batch, model.length)` int64 on the CPU.

    The vocabulary's last token stands for the mask. Every sequence has equally many masked tokens, so that the mean of
    the micro-batches' losses is the loss of the batch.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    mask_token = model.vocab - 1
    tokens = torch.randint(mask_token, (batch, model.length), generator=generator, device="cpu")
    order = torch.rand(batch, model.length, generator=generator, device="cpu").argsort(dim=1)
    masked = order < max(1, round(0.15 * model.length))
    return (tokens.masked_fill(masked, mask_token),), tokens.masked_fill(~masked, IGNORED)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, in nats a masked token, of logits `(batch, length, vocab)` against ids `(batch, length)`."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
