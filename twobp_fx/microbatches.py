"""Split a batch's arguments into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import InputError
from .inputs import Inputs


def split_batch(inputs: Inputs, count: int) -> list[tuple[torch.Tensor, ...]]:
    """The flat tensors of each of `count` micro-batches: equal slices along dimension 0, as views.

    Tensors without dimensions, and tensors of size 1 along dimension 0 where others are larger, go whole to every micro-batch.
    Raises InputError if the sizes disagree, or if the batch does not divide evenly.
    """
    sizes = batch_sizes(inputs)
    distinct = sorted(set(sizes.values()))
    if len(distinct) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise InputError(
            f"The arguments disagree on the batch size (dimension 0): {listed}. Every tensor must have the same, or 1 where it "
            "is the same for the whole batch."
        )
    batch = distinct[0] if distinct else 1
    if distinct and (batch < count or batch % count):
        relation = "is too small for" if batch < count else "cannot be split evenly into"
        raise InputError(
            f"A batch of {batch} {relation} {count} micro-batches. Use a batch size that is a multiple of {count}, or pass another "
            "microbatches= to twobp_fx.compile. Nothing was run."
        )
    size = batch // count
    return [
        tuple(
            dense(tensor[i * size : (i + 1) * size] if path in sizes and count > 1 else tensor)
            for path, tensor in zip(inputs.paths, inputs.tensors, strict=True)
        )
        for i in range(count)
    ]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it has gaps or overlaps: graphs are compiled for tensors that fill their memory once."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != filled:
            return tensor.contiguous()
        filled *= size
    return tensor


def batch_sizes(inputs: Inputs) -> dict[str, int]:
    """Size along dimension 0 of the tensors that are split, by their path in the arguments."""
    sizes = {p: t.size(0) for p, t in zip(inputs.paths, inputs.tensors, strict=True) if t.dim()}
    larger = {path: size for path, size in sizes.items() if size != 1}
    return larger or sizes


def join_gradients(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """The gradient of a batch's argument from those of its micro-batches: end to end if it was split, summed if it was shared."""
    if len(parts) > 1 and parts[0].shape == whole.shape:
        return torch.stack(list(parts)).sum(0)
    return torch.cat(list(parts)) if whole.dim() else torch.stack(list(parts)).sum(0)
