"""Tensors as a graph was compiled for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def with_strides(tensor: torch.Tensor, strides: Sequence[int], *, own: bool) -> torch.Tensor:
    """A copy with these strides.

    own: a graph of ours computed it. Then, where a dimension was expanded when traced (stride 0), all entries along it are equal,
    and one is kept; of any other tensor there is nothing known that the strides do not show.
    """
    shape = tensor.shape
    if own:
        for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return made.expand(shape)
