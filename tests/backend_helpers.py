"""Helpers of the tests of the torch.compile backend: the same step run eagerly, compiled, and compiled with W put off."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import twobp_fx
from tests.helpers import equal

Step = Callable[..., Any]
"""Takes a callable (the module, compiled or not) and its arguments; runs forwards and backwards, and may return outputs."""


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before is used; warnings that torch gives itself are no errors."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)  # Inductor's own imports
        warnings.filterwarnings("ignore", message=".*grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
        warnings.filterwarnings("ignore", message=".*Function'> should not be instantiated")  # by Dynamo
        yield


def compiled(module: Any, compiler: Any = "eager", **settings: Any) -> Any:
    """`module` compiled by the backend."""
    return torch.compile(module, backend="twobp", options={"compiler": compiler}, **settings)


def backward_of_sum(call: Callable[..., Tensor], *args: Any) -> Tensor:
    """One forward, and the backward of the sum of its squares."""
    output = call(*args)
    output.abs().pow(2).sum().backward()
    return output


def deferred(step: Step) -> Step:
    """The step with every W put off to its end."""

    def run(*args: Any) -> Any:
        with twobp_fx.defer_weight_grads() as pending:
            result = step(*args)
        pending.run()
        assert len(pending) == 0
        return result

    return run


def state_after(step: Step, module: nn.Module, args: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Every gradient, buffer and output of a step, on copies of module and arguments; eagerly unless there are settings."""
    module = copy.deepcopy(module)
    args = [each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each for each in args]
    torch.manual_seed(3)
    outputs = step(compiled(module, **settings) if settings else module, *args)
    state = {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    state |= {f"gradient of input {i}": each.grad for i, each in enumerate(args) if isinstance(each, Tensor)}
    state |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return state | {f"output {i}": each for i, each in enumerate(torch.utils._pytree.tree_leaves(outputs))}


def assert_as_eager(
    module: nn.Module, *args: Any, step: Step = backward_of_sum, tolerance: float = 0.0, compiler: Any = "eager", **settings: Any
) -> None:
    """Compiled, and compiled with W put off, a step does just what it does eagerly."""
    expected = state_after(step, module, args)
    for how in (step, deferred(step)):
        found = state_after(how, module, args, compiler=compiler, **settings)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if tolerance and value is not None:
                torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert equal(found[name], value) if isinstance(value, Tensor) or value is None else found[name] == value, name
