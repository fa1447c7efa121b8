"""The stage for torch.distributed.pipelining's schedules: compiled, with a backward that comes in two halves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .backend import twobp
from .deferral import PendingWeightGradients, defer_weight_grads
from .emit import Compiler
from .errors import InputError


class PipelineStage(torch_pipelining.PipelineStage):
    """Takes the place of `torch.distributed.pipelining.PipelineStage`, in any of its schedules, with the same arguments.

    The module (inside of a DistributedDataParallel, the one it wraps) is compiled in place, as by `Module.compile`: it stays the
    same object, with the same parameters and names. Where a schedule asks for I and W, the backward runs as I and W; where it asks
    for B, as B. Each runs once a micro-batch.

    compiler: as for `twobp_fx.compile`. Raises InputError for an unknown one, and for `dw_builder`, which does by hand what
    this class is for.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        compiler: Compiler = "inductor",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("dw_builder") is not None:
            raise InputError("twobp_fx.PipelineStage splits the backward itself: leave out dw_builder.")
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        inner = submodule.module if isinstance(submodule, DistributedDataParallel) else submodule
        if not _is_compiled(inner):
            _compile_in_place(inner, compiler)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Run B ("full"), I ("input") or W ("weight") of one micro-batch, as the schedule asks."""
        if backward_type == "input":
            if (
                bwd_kwargs["output_grads"] is None
            ):  # the loss: torch puts it in a tuple, and would pass over it for want of a partner
                bwd_kwargs = {**bwd_kwargs, "output_grads": (None,) * len(bwd_kwargs["stage_output"])}
            with defer_weight_grads() as pending:
                gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward=False)
            return gradients, [pending]
        if backward_type == "weight":
            self._run_weight_gradients(bwd_kwargs, last_backward)
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)

    def _run_weight_gradients(self, bwd_kwargs: dict[str, Any], last_backward: bool) -> None:
        pending: PendingWeightGradients
        [pending] = bwd_kwargs["param_groups"]
        if not isinstance(self.submod, DistributedDataParallel):
            pending.run()
        elif not last_backward:
            with self.submod.no_sync():
                pending.run()
        else:
            self.submod.reducer.prepare_for_backward(list(_tensors(bwd_kwargs["stage_output"])))
            late = {parameter for each in pending for parameter in each.parameters.values()}
            early = [p for p in self.submod.parameters() if p.requires_grad and p.grad is not None and p not in late]
            pending.run()
            if early:  # their gradients are complete, and the reducer waits for a sign of that
                torch.autograd.backward(early, [torch.zeros_like(parameter) for parameter in early])


def _compile_in_place(module: nn.Module, compiler: Compiler) -> None:
    """`Module.compile`, which leaves modules that torch itself defines (nn.Sequential, for one) uncompiled without a word."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Micro-batches are all of one shape; torch tries the stage once on another, which shall not make all sizes symbolic.
    module._compiled_call_impl = torch.compile(call, backend=twobp, dynamic=False, options={"compiler": compiler})


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
