"""Real text without a download: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

SKIPPED_FOLDERS: Final = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})
"""Tests, and what is installed next to the standard library but is no part of it."""


def _source_files(root: Path) -> Iterator[Path]:
    """Every Python file under `root`: a folder's own first, then its subfolders', both by name."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def load(limit: int = 4_000_000) -> Tensor:
    """The first `limit` bytes of the standard library's `.py` files, in a fixed order: a one-dimensional uint8 tensor.

    The same on every machine with the same Python version. Raises FileNotFoundError if Python came without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in _source_files(root):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    if not data:
        raise FileNotFoundError(f"no Python source files under {root}; use a Python that has its standard library's sources")
    return torch.frombuffer(data, dtype=torch.uint8)[:limit].clone()


def batches(data: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch of random windows of `data`, and the same windows one byte later; each call draws the next batch.

    `data` is one-dimensional uint8 and longer than `length`; `generator` is a CPU one. The result is `(x, y)`, both
    `(batch, length)` int64, with `y[:, i]` the byte that follows `x[:, i]`.
    """
    if len(data) <= length:
        raise ValueError(f"the text has {len(data)} bytes, too few for windows of {length} + 1; pass more text")
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator, device="cpu")
    windows = data[starts + torch.arange(length + 1, device="cpu")].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def unigram_entropy(data: Tensor) -> float:
    """The entropy of the distribution of single bytes, in nats: the loss of knowing their frequencies alone."""
    frequencies = torch.bincount(data, minlength=256).double() / len(data)
    return float(torch.special.entr(frequencies).sum())
