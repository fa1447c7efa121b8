"""Every model family in 1, 2 and 4 stages, under all eight schedules, eager and inductor: gradients equal plain autograd's.

Expected values come from `loss.backward()` on a copy of the model, micro-batch by micro-batch. With compiler="eager" the split
backward must also equal the unsplit one bit by bit. The whole matrix is `make matrix`; what is not marked runs with `make test`
and touches every model, stage count, schedule and compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import twobp_fx
from examples import bert, llama, mamba, resnet
from twobp_fx.schedules import build

SCHEDULES = ("naive", "gpipe", "1f1b-1", "1f1b-2")
MICROBATCH = 2


@dataclass(frozen=True)
class Case:
    """A model and how to call it: `batch(size)` gives (args, kwargs, target)."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Any]]


def example(module: ModuleType, **sizes: Any) -> Case:
    model = module.build(**sizes)

    def batch(size: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        args, target = module.example_batch(model, batch=size)
        return args, {}, target

    return Case(model, module.loss_fn, batch)


def transformer(name: str) -> Case:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    if name == "GPT2":
        config = transformers.GPT2Config(
            n_layer=4, n_embd=32, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
        )
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=4, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, **sizes
        )
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).train()

    def batch(size: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        tokens = torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(0))
        return (), {"input_ids": tokens, "labels": tokens}, None

    return Case(model, None, batch)


FAMILIES: dict[str, Callable[[], Case]] = {
    "llama": lambda: example(llama, width=32, depth=4, heads=2, hidden=64, length=16, vocab=64),
    "bert": lambda: example(bert, width=32, depth=4, heads=2, length=16, vocab=64),
    "mamba": lambda: example(mamba, width=16, depth=4, length=16, vocab=64),
    # Not smaller: over a 32x32 image the last batch norms see two values a channel, +1 and -1 after normalizing, and whether their
    # residual sum is above zero is then decided by rounding.
    "resnet": lambda: example(resnet, layers=(1, 1, 1, 1), width=8, classes=10, image=64),
    "gpt2": lambda: transformer("GPT2"),
    "hf-llama": lambda: transformer("Llama"),
}


def chunks(value: Any, count: int) -> list[Any]:
    if value is None:
        return [None] * count
    return list(value.chunk(count))


def plain_gradients(case: Case, microbatches: int) -> tuple[float, dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Mean loss, gradients by FQN, and buffers afterwards, from plain autograd."""
    model = copy.deepcopy(case.model)
    args, kwargs, target = case.batch(microbatches * MICROBATCH)
    parts = [chunks(arg, microbatches) for arg in args]
    named = {name: chunks(arg, microbatches) for name, arg in kwargs.items()}
    targets = chunks(target, microbatches)
    total = 0.0
    for i in range(microbatches):
        output = model(*(part[i] for part in parts), **{name: part[i] for name, part in named.items()})
        loss = output.loss if case.loss_fn is None else case.loss_fn(output, targets[i])
        (loss / microbatches).backward()
        total += loss.item() / microbatches
    return total, {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5 * scale + 1e-8, msg=lambda text: f"{name}: {text}")


def check(family: str, stages: int, compiler: str, schedules: tuple[str, ...] = SCHEDULES) -> None:
    torch.manual_seed(0)
    case = FAMILIES[family]()
    state = copy.deepcopy(case.model.state_dict())
    pipe = twobp_fx.compile(case.model, stages, loss_fn=case.loss_fn, compiler=compiler)
    for schedule in schedules:
        found: list[dict[str, torch.Tensor | None]] = []
        for split in (True, False):
            pipe.plan = build(schedule, ranks=stages, split_backward=split)
            microbatches = pipe.plan.microbatches
            case.model.load_state_dict(state)
            loss, expected, buffers = plain_gradients(case, microbatches)
            args, kwargs, target = case.batch(microbatches * MICROBATCH)
            case.model.zero_grad()
            mean = pipe.step(*args, target=target, **kwargs)
            where = f"{family}, {stages} stages, {schedule}, {'split' if split else 'unsplit'}, {compiler}"
            assert mean.item() == pytest.approx(loss, rel=1e-5), where
            found.append({name: p.grad for name, p in case.model.named_parameters()})
            assert expected.keys() == found[-1].keys()
            for name, gradient in expected.items():
                actual = found[-1][name]
                assert (actual is None) == (gradient is None), f"{where}: {name}"
                if gradient is not None and actual is not None:
                    assert_close(actual, gradient, f"{where}: {name}")
            for name, buffer in case.model.named_buffers():
                assert_close(buffer, buffers[name], f"{where}: {name}")
        if compiler == "eager":
            for name, gradient in found[0].items():
                assert gradient is None or torch.equal(gradient, found[1][name]), f"{family}, {stages}, {schedule}: {name}"


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_eager(family: str, stages: int) -> None:
    check(family, stages, "eager")


# What of the inductor half runs with every `make test`: every family, every stage count, every schedule, once or more.
SAMPLE = {
    ("llama", 2): ("1f1b-1",),
    ("bert", 1): ("gpipe",),
    ("mamba", 2): ("1f1b-2",),
    ("resnet", 2): ("naive",),
    ("gpt2", 4): SCHEDULES,
    ("hf-llama", 2): ("gpipe",),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(("family", "stages"), SAMPLE, ids=lambda value: str(value))
def test_inductor_sample(family: str, stages: int) -> None:
    check(family, stages, "inductor", SAMPLE[family, stages])


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor(family: str, stages: int) -> None:
    check(family, stages, "inductor")
