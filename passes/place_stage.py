"""Place a stage's forward graph on a device.

In:  a forward graph captured on one device. Out: the same graph for another: its inputs live there, and operators that make tensors
on a named device (arange, zeros, to) make them there. Never: touches an operator that names no device.

    arange(16, device=cpu)  ->  arange(16, device=cuda:1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .graph import placeholders


def place_stage(module: fx.GraphModule, captured_on: torch.device, device: torch.device) -> None:
    """Place `module` in place. Fake values of inner nodes keep the device of the capture; those of the inputs move."""

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) and argument == captured_on else argument

    for node in module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
    for node in placeholders(module.graph):
        value = node.meta["val"]
        if value.device == captured_on:
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    module.recompile()
