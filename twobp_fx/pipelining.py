"""The stage for torch.distributed.pipelining's schedules: compiled, with a backward that comes in two halves."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .backend import twobp
from .deferral import PendingWeightGradients, defer_weight_grads
from .emit import Compiler, emitter
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
        emitter(compiler)  # which knows whether there is such a one
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        inner = submodule.module if isinstance(submodule, DistributedDataParallel) else submodule
        self._warned = False
        if not _is_compiled(inner):
            _compile_in_place(inner, compiler, f"stage_{stage_index}")

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        """Torch runs the stage once on made-up values, to learn what it returns. That shall show neither in its buffers nor in
        DDP, which would reduce the gradients of the first micro-batch.
        """
        with _buffers_kept(module):
            return self.forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _compute_input_grads(
        self, outputs: list[torch.Tensor], all_fwd_inputs: list[torch.Tensor], grad_outputs: Any = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Torch asks for gradients at made-up values, to learn their layout. It is the input's own, which None stands for."""
        if any(isinstance(each, DTensor) for each in all_fwd_inputs):
            return super()._compute_input_grads(outputs, all_fwd_inputs, grad_outputs)
        return (None,) * len(all_fwd_inputs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Run B ("full"), I ("input") or W ("weight") of one micro-batch, as the schedule asks."""
        if backward_type == "input":
            if bwd_kwargs["output_grads"] is None:
                # The loss, which torch has put into a tuple and would pass over, as one that has no gradients.
                bwd_kwargs = {**bwd_kwargs, "output_grads": (None,) * len(bwd_kwargs["stage_output"])}
            with defer_weight_grads() as pending:
                gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward=False)
            if not len(pending):
                self._warn_if_whole(pending)
            return gradients, [pending]
        if backward_type == "weight":
            self._run_weight_gradients(bwd_kwargs, last_backward)
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)

    def _warn_if_whole(self, pending: PendingWeightGradients) -> None:
        if self._warned or all(parameter.grad is None for parameter in self.submod.parameters()):
            return
        self._warned = True
        warnings.warn(
            f"Stage {self.stage_index} leaves nothing for W: the schedule gains nothing from the split there. Its parameters' "
            "gradients are computed in I, since the module was compiled by another backend, is not compiled at all, or for these "
            f"reasons:\n{pending}",
            stacklevel=2,
        )

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


def _compile_in_place(module: nn.Module, compiler: Compiler, name: str) -> None:
    """`Module.compile`, which leaves modules that torch itself defines (nn.Sequential, for one) uncompiled without a word."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # A code object of its own: Dynamo gives up on one that it has compiled too often, whatever for.
    call.__code__ = call.__code__.replace(co_name=name)
    # Micro-batches are all of one shape; torch tries the stage once on another, which shall not make all sizes symbolic.
    module._compiled_call_impl = torch.compile(call, backend=twobp, dynamic=False, options={"compiler": compiler})


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Buffers have afterwards the values, and are the objects, that they were before."""
    before = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in before:
            owner._buffers[name] = buffer
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
