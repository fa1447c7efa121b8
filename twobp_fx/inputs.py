"""The arguments of one call, flat: its tensors apart from everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one call, flat: its tensors, in order, and everything else as a template."""

    tensors: tuple[torch.Tensor, ...]
    template: tuple[Any, ...]
    spec: pytree.TreeSpec
    paths: tuple[str, ...]

    @staticmethod
    def flatten(*trees: Any) -> Inputs:
        """Flatten argument trees; a tensor leaves its position in the template. `paths` names the tensors for messages."""
        entries, spec = pytree.tree_flatten_with_path(trees)
        tensors = [leaf for _, leaf in entries if isinstance(leaf, torch.Tensor)]
        paths = [pytree.keystr(path) for path, leaf in entries if isinstance(leaf, torch.Tensor)]
        template = tuple(_SLOT if isinstance(leaf, torch.Tensor) else leaf for _, leaf in entries)
        return Inputs(tuple(tensors), template, spec, tuple(paths))

    @property
    def others(self) -> list[Any]:
        """The leaves that are no tensors."""
        return [leaf for leaf in self.template if leaf is not _SLOT]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The trees again, with other tensors in the places of the first."""
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if leaf is _SLOT else leaf for leaf in self.template], self.spec)


class _Slot:
    def __repr__(self) -> str:
        return "<tensor>"


_SLOT = _Slot()
