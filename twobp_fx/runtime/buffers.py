"""The buffers that parameter gradients are added to."""

from __future__ import annotations

import torch


def buffer_like(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialized buffer, laid out as autograd wants `.grad`: with the parameter's strides if these are dense, else row-major.

    On the parameter's device; fake if the parameter is. dtype: the parameter's if not given.
    """
    buffer = torch.empty_like(parameter, dtype=dtype)
    if buffer.stride() == parameter.stride():
        return buffer
    return torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)


def new_buffer(like: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape, strides, dtype and device of `like`."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
