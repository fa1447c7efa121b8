from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import bert, gpt, llama, mamba, resnet, text

FAMILIES = (gpt, llama, bert, mamba, resnet)
TINY: dict[ModuleType, dict[str, Any]] = {
    gpt: {"width": 32, "depth": 3, "heads": 2, "length": 16},
    llama: {"width": 32, "hidden": 48, "depth": 3, "heads": 2, "length": 16},
    bert: {"width": 32, "depth": 3, "heads": 2, "length": 16},
    mamba: {"width": 16, "depth": 3, "state": 4, "length": 13},
    resnet: {"width": 4, "layers": (1, 1, 1, 1), "image": 32},
}


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.__name__.rpartition(".")[2])
def family(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def expected_shape(model: Any, batch: int) -> tuple[int, ...]:
    if isinstance(model, resnet.ResNet):
        return (batch, model.classes)
    return (batch, model.length, model.vocab)


def test_build_without_arguments_gives_a_small_working_model(family: ModuleType) -> None:
    model = family.build()
    args, target = family.example_batch(model, batch=2)
    output = model(*args)
    assert tuple(output.shape) == expected_shape(model, 2)
    loss = family.loss_fn(output, target)
    assert loss.shape == ()
    # An untrained model is about as good as guessing.
    assert loss.item() == pytest.approx(math.log(output.shape[-1]), rel=0.35)
    assert sum(p.numel() for p in model.parameters()) < 3e6


def test_every_parameter_gets_a_gradient(family: ModuleType) -> None:
    model = family.build(**TINY[family])
    args, target = family.example_batch(model, batch=2)
    family.loss_fn(model(*args), target).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero() > 0, name


def test_example_batch_is_deterministic(family: ModuleType) -> None:
    model = family.build(**TINY[family])
    (first,), first_target = family.example_batch(model, batch=3)
    (again,), again_target = family.example_batch(model, batch=3)
    (other,), _ = family.example_batch(model, batch=3, seed=1)
    assert torch.equal(first, again)
    assert torch.equal(first_target, again_target)
    assert not torch.equal(first, other)


def test_mean_of_micro_batch_losses_is_the_batch_loss(family: ModuleType) -> None:
    model = family.build(**TINY[family]).double().eval()
    (x,), target = family.example_batch(model, batch=4)
    x = x.double() if x.is_floating_point() else x
    whole = family.loss_fn(model(x), target)
    parts = [family.loss_fn(model(a), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_exports_in_training_mode(family: ModuleType) -> None:
    model = family.build(**TINY[family]).train()
    args, _ = family.example_batch(model, batch=2)
    program = torch.export.export(model, args, strict=False)
    assert any(name.startswith("blocks.2.") for name in program.state_dict)
    torch.testing.assert_close(program.module()(*args), model(*args))


@pytest.mark.parametrize(
    ("family", "low", "high"),
    [
        (gpt, 1.5e9, 1.6e9),
        (llama, 6.5e9, 7.5e9),
        (bert, 0.33e9, 0.36e9),
        (mamba, 1.3e9, 1.5e9),
        (resnet, 60.1e6, 60.3e6),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if isinstance(value, ModuleType) else "",
)
def test_paper_size(family: ModuleType, low: float, high: float) -> None:
    with torch.device("meta"):
        model = family.build(**family.PAPER)
    parameters = list(model.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert low < sum(parameter.numel() for parameter in parameters) < high


@pytest.mark.parametrize("family", [gpt, llama, mamba], ids=["gpt", "llama", "mamba"])
def test_language_models_are_causal(family: ModuleType) -> None:
    model = family.build(**TINY[family]).double().eval()
    (tokens,), _ = family.example_batch(model, batch=1)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % model.vocab
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_gpt_options() -> None:
    tied = gpt.build(**TINY[gpt], tied=True)
    assert tied.head.weight is tied.tokens.weight
    model = gpt.build(**TINY[gpt], dropout=0.5)
    args, _ = gpt.example_batch(model)
    assert not torch.equal(model(*args), model(*args))
    model.eval()
    assert torch.equal(model(*args), model(*args))


def test_rotary_positions_are_relative() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = llama.rotate(q.expand(1, 1, 6, 8)) @ llama.rotate(k.expand(1, 1, 6, 8)).mT
    for offset in range(-5, 6):
        diagonal = scores[0, 0].diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


def test_bert_ignores_what_the_attention_mask_hides() -> None:
    model = bert.build(**TINY[bert]).double()
    (tokens,), _ = bert.example_batch(model, batch=2)
    mask = torch.ones_like(tokens)
    torch.testing.assert_close(model(tokens, mask), model(tokens))
    mask[:, 10:] = 0
    changed = tokens.clone()
    changed[:, 10:] = 3
    torch.testing.assert_close(model(tokens, mask)[:, :10], model(changed, mask)[:, :10])
    assert not torch.allclose(model(tokens, mask)[:, :10], model(tokens)[:, :10])


def test_resnet152_has_fifty_bottlenecks_and_shrinks_32_times() -> None:
    with torch.device("meta"):
        model = resnet.build(**resnet.PAPER)
        assert len(model.blocks) == 50
        x = model.stem(torch.empty(2, 3, 224, 224))
        for block in model.blocks:
            x = block(x)
    assert x.shape == (2, 2048, 7, 7)


def sequential_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
    outputs = []
    for t in range(x.shape[1]):
        h = torch.exp(delta[:, t, :, None] * a) * h + delta[:, t, :, None] * b[:, t, None, :] * x[:, t, :, None]
        outputs.append((h * c[:, t, None, :]).sum(-1))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("largest_step", [0.1, 1.0, 1000.0])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 32, 45])
def test_mamba_scan_equals_the_sequential_loop(length: int, largest_step: float) -> None:
    batch, channels, state = 2, 3, 4
    inputs = (
        torch.randn(batch, length, channels, dtype=torch.float64),
        torch.rand(batch, length, channels, dtype=torch.float64) * largest_step,  # at 1000 most decays are exactly 0
        -torch.rand(channels, state, dtype=torch.float64) * 16,
        torch.randn(batch, length, state, dtype=torch.float64),
        torch.randn(batch, length, state, dtype=torch.float64),
    )
    for tensor in inputs:
        tensor.requires_grad_()
    cotangent = torch.randn(batch, length, channels, dtype=torch.float64)
    actual, expected = mamba.selective_scan(*inputs), sequential_scan(*inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12 * largest_step)
    # With one step nothing decays and `a` is unused: its gradient is zero.
    actual_grads = torch.autograd.grad(actual, inputs, cotangent, materialize_grads=True)
    expected_grads = torch.autograd.grad(expected, inputs, cotangent, materialize_grads=True)
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        assert actual_grad.isfinite().all()
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-11, atol=1e-11 * largest_step)


def test_mamba_graph_grows_with_the_logarithm_of_the_length() -> None:
    def nodes(length: int) -> int:
        model = mamba.build(**{**TINY[mamba], "depth": 1, "length": length})
        args, _ = mamba.example_batch(model, batch=1)
        return len(torch.export.export(model, args, strict=False).graph.nodes)

    sizes = [nodes(length) for length in (16, 32, 64)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] <= 20


def test_text_is_real_text() -> None:
    data = text.load()
    assert data.dtype == torch.uint8
    assert 1_000_000 < len(data) <= 4_000_000
    assert torch.equal(data[:1000], text.load(limit=1000))
    assert 1.0 < text.unigram_entropy(data) < math.log(256)


def test_unigram_entropy_of_known_distributions() -> None:
    assert text.unigram_entropy(torch.zeros(10, dtype=torch.uint8)) == 0.0
    assert text.unigram_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(math.log(256))


def test_text_batches() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    x, y = text.batches(data, 5, 16, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (5, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    again, _ = text.batches(data, 5, 16, torch.Generator().manual_seed(0))
    assert torch.equal(x, again)
    text.batches(data, 5, 199, torch.Generator())
    with pytest.raises(ValueError, match="too few"):
        text.batches(data, 5, 200, torch.Generator())
