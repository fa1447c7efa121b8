"""`pipe(x)`: a module call like any other. Outputs and gradients against the model's own."""

import copy
import gc
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twobp_fx
from tests.pipe_helpers import WIDTH, Between, assert_same_state, batch, linear, make_pipe, mlp, mse

torch.set_num_threads(1)


Pair = namedtuple("Pair", ["first", "second"])


class Fork(nn.Module):
    """Two layers; what it returns is up to `function`, of the two activations."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        return self.function(h, self.b(h))


def assert_backward_is_plain(
    model: nn.Module, x: Tensor, reduce: Callable[[Any], Tensor], stages: int = 2, **tolerance: float
) -> None:
    """Outputs, every parameter's and the input's gradient; by `backward()` and by `torch.autograd.grad`."""
    expected = copy.deepcopy(model)
    pipe = make_pipe(model, stages)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    result, reference = pipe(mine), expected(theirs)
    torch.testing.assert_close(result, reference, **tolerance)
    reduce(result).backward()
    reduce(reference).backward()
    assert_same_state(model, expected, **tolerance)
    torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
    gradients = torch.autograd.grad(reduce(pipe(mine)), [*model.parameters(), mine], allow_unused=True)
    references = torch.autograd.grad(reduce(expected(theirs)), [*expected.parameters(), theirs], allow_unused=True)
    for gradient, wanted in zip(gradients, references, strict=True):
        assert (gradient is None) == (wanted is None)
        torch.testing.assert_close(gradient, wanted, **tolerance)


class TestOutputs:
    @pytest.mark.parametrize(
        ("function", "reduce"),
        [
            (lambda h, y: y, lambda o: o.square().mean()),
            (lambda h, y: (y, h), lambda o: o[0].mean() + o[1].square().sum()),
            (lambda h, y: {"y": y, "list": [h, (y * 2,)]}, lambda o: o["y"].mean() + o["list"][1][0].sum()),
            (lambda h, y: Pair(y, 3), lambda o: o.first.sum() * o.second),
            (lambda h, y: (y, None, 2, 1.5), lambda o: o[0].sum() * o[3]),
            (lambda h, y: (y, y), lambda o: o[0].mean() + 2 * o[1].sum()),
            (lambda h, y: (y, y.view(-1), h[0]), lambda o: o[0].mean() + 2 * o[1].sum() + 3 * o[2].sum()),
            (lambda h, y: (y, y.argmax(1)), lambda o: (o[0] * o[1].float()[:, None]).sum()),
            (lambda h, y: y.sum(0, keepdim=True).expand(4, WIDTH), lambda o: o.square().sum()),
            (lambda h, y: y.t(), lambda o: (o @ o.t()).sum()),
            (lambda h, y: (y.detach(), y), lambda o: (o[0] * o[1]).sum()),
            (lambda h, y: [y], lambda o: o[0].sum()),
        ],
        ids=[
            "tensor",
            "tuple",
            "nested",
            "namedtuple",
            "plain values",
            "twice the same",
            "views",
            "integers",
            "expanded",
            "transposed",
            "detached",
            "list of one",
        ],
    )
    def test_of_any_structure(self, function, reduce):
        for stages in (1, 2):
            assert_backward_is_plain(Fork(function), batch()[0], reduce, stages)

    def test_only_some_used(self):
        """A gradient that eager leaves None stays None."""
        model = Fork(lambda h, y: (h, y))
        assert_backward_is_plain(model, batch()[0], lambda o: o[0].sum())
        assert model.b.weight.grad is None
        assert_backward_is_plain(Fork(lambda h, y: (h, y)), batch()[0], lambda o: o[1].sum())

    def test_the_input_and_a_parameter_returned(self):
        class Through(Fork):
            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                return x, self.b(self.a(x)), self.b.weight

        assert_backward_is_plain(
            Through(lambda h, y: y), batch()[0], lambda o: o[0].square().sum() + o[1].sum() + o[2].square().sum()
        )

    def test_transformer_and_convolution(self):
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        model = nn.Sequential(linear(), layer, linear())
        assert_backward_is_plain(model, torch.randn(3, 4, WIDTH), lambda o: o.square().mean(), rtol=1e-4, atol=1e-5)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
        assert_backward_is_plain(model, torch.randn(4, 2, 6, 6), lambda o: o.square().mean(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("size", [0, 1, 3])
    def test_any_batch_size(self, size):
        x = torch.randn(size, WIDTH)
        model = mlp()
        torch.testing.assert_close(make_pipe(model)(x), model(x))


class TestArguments:
    def two(self) -> nn.Module:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = linear(), linear()

            def forward(self, x: Tensor, z: Tensor) -> Tensor:
                return self.b(self.a(x) * z)

        return Two()

    def test_one_tensor_given_twice_and_two_tensors_after_it(self):
        model = self.two()
        pipe = make_pipe(model)
        x, z = batch()
        torch.testing.assert_close(pipe(x, x), model(x, x))
        torch.testing.assert_close(pipe(x, z), model(x, z))

    def test_one_tensor_given_twice_has_both_gradients(self):
        model = self.two()
        pipe = make_pipe(model)
        x = batch()[0].requires_grad_()
        (gradient,) = torch.autograd.grad(pipe(x, x).sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(model(x, x).sum(), x)[0])

    def test_a_parameter_as_argument(self):
        model = self.two()
        pipe = make_pipe(model)
        weight = model.a.weight
        (gradient,) = torch.autograd.grad(pipe(weight, weight).sum(), weight)
        torch.testing.assert_close(gradient, torch.autograd.grad(model(weight, weight).sum(), weight)[0])

    def test_layouts(self):
        model = mlp()
        pipe = make_pipe(model)
        window = torch.randn(3 + WIDTH).unfold(0, WIDTH, 1)
        for x in (window, torch.randn(4, WIDTH), torch.randn(WIDTH, 4).t(), torch.randn(WIDTH).expand(4, WIDTH)):
            torch.testing.assert_close(pipe(x), model(x))


class TestAutograd:
    def test_retain_graph(self):
        model = mlp()
        expected = copy.deepcopy(model)
        x, y = batch()
        for owner, call in ((model, make_pipe(model)), (expected, expected)):
            loss = mse(call(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
            del owner
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same_state(model, expected)

    def test_several_calls_before_their_backwards(self):
        model = mlp()
        expected = copy.deepcopy(model)
        pipe = make_pipe(model)
        batches = [batch(size) for size in (4, 2, 4)]
        losses = [mse(pipe(x), y) for x, y in batches]
        references = [mse(expected(x), y) for x, y in batches]
        for i in (1, 2, 0):
            losses[i].backward()
            references[i].backward()
        assert_same_state(model, expected)

    def test_inside_a_larger_graph(self):
        inner = mlp()
        outer = nn.ModuleList([linear(), linear()])
        pipe = make_pipe(inner)
        x, y = batch()
        expected_inner, expected_outer = copy.deepcopy(inner), copy.deepcopy(outer)
        mse(outer[1](pipe(outer[0](x)) + pipe(x)), y).backward()
        mse(expected_outer[1](expected_inner(expected_outer[0](x)) + expected_inner(x)), y).backward()
        assert_same_state(inner, expected_inner)
        assert_same_state(outer, expected_outer)

    def test_as_a_submodule(self):
        model = mlp()
        whole = nn.Sequential(linear(), make_pipe(model), linear())
        expected = nn.Sequential(copy.deepcopy(whole[0]), copy.deepcopy(model), copy.deepcopy(whole[2]))
        assert list(whole.state_dict()) == list(expected.state_dict())
        x, y = batch()
        mse(whole(x), y).backward()
        mse(expected(x), y).backward()
        assert_same_state(whole, expected)
        whole.eval()
        assert not model.training
        assert not model[0].training

    def test_differentiating_twice_is_refused(self):
        x = batch()[0].requires_grad_()
        (gradient,) = torch.autograd.grad(make_pipe(mlp())(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    @pytest.mark.parametrize("name", ["2.weight", "4.weight"])
    def test_a_parameter_written_before_the_backward(self, name):
        model = mlp()
        x = batch()[0]
        out = make_pipe(model)(x)
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_an_input_written_before_the_backward(self):
        x = batch()[0]
        out = make_pipe(mlp())(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_an_output_written_before_the_backward(self):
        out = make_pipe(Fork(lambda h, y: (h, y)))(batch()[0])
        out[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out[1].sum().backward()

    def test_a_parameter_replaced_before_the_backward(self):
        """As in eager: the gradient is that of the call, and goes to the parameter of the call."""
        model = mlp()
        expected = copy.deepcopy(model)
        pipe = make_pipe(model)
        x, y = batch()
        loss, reference = mse(pipe(x), y), mse(expected(x), y)
        old, expected_old = model[2].weight, expected[2].weight
        for m in (model, expected):
            m[2].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        loss.backward()
        reference.backward()
        torch.testing.assert_close(old.grad, expected_old.grad)
        assert_same_state(model, expected)

    def test_hooks_fire_once(self):
        model = mlp()
        calls: list[str] = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: calls.append(name))
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"post {name}"))
        make_pipe(model)(batch()[0]).sum().backward()
        assert sorted(calls) == sorted(
            [n for n, _ in model.named_parameters()] + [f"post {n}" for n, _ in model.named_parameters()]
        )

    def test_checkpointed(self):
        model = nn.Sequential(linear(), nn.Dropout(0.5), linear()).double()
        pipe = make_pipe(model)
        x = torch.randn(4, WIDTH).double().requires_grad_()
        torch.manual_seed(3)
        gradients = torch.autograd.grad(
            torch.utils.checkpoint.checkpoint(pipe, x, use_reentrant=False).sum(), [*model.parameters()]
        )
        torch.manual_seed(3)
        expected = torch.autograd.grad(pipe(x).sum(), [*model.parameters()])
        torch.testing.assert_close(gradients, expected)

    def test_gradient_scaler(self):
        model = mlp()
        expected = copy.deepcopy(model)
        pipe = make_pipe(model)
        x, y = batch()
        for owner, call in ((model, pipe), (expected, expected)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
            scaler.scale(mse(call(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(owner.parameters(), 0.1)
            scaler.step(optimizer)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


class TestModes:
    def test_no_grad(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        expected = copy.deepcopy(model)
        pipe = make_pipe(model)
        x = batch()[0]
        with torch.no_grad():
            out = pipe(x)
            torch.testing.assert_close(out, expected(x))
        assert not out.requires_grad
        assert_same_state(model, expected)
        pipe(x).sum().backward()
        assert model[0].weight.grad is not None

    def test_inference_mode(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        expected = copy.deepcopy(model)
        pipe = make_pipe(model)
        x = batch()[0]
        with torch.inference_mode():
            inside = x * 1
            torch.testing.assert_close(pipe(x), expected(x))
            torch.testing.assert_close(pipe(inside), expected(inside))
        assert_same_state(model, expected)
        pipe(x).sum().backward()
        expected(x).sum().backward()
        assert_same_state(model, expected)

    def test_inference_tensors_in_inference_mode_first(self):
        model = mlp()
        pipe = make_pipe(model)
        with torch.inference_mode():
            x = torch.randn(4, WIDTH)
            torch.testing.assert_close(pipe(x), model(x))
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(pipe(x), model(x))

    def test_eval(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), linear())
        pipe = make_pipe(model)
        x = batch()[0]
        pipe(x)
        pipe.eval()
        before = {name: b.clone() for name, b in model.named_buffers()}
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(dict(model.named_buffers()), before)

    def test_batch_norm_counts_one_batch(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        expected = copy.deepcopy(model)
        pipe = make_pipe(model)
        for size in (4, 8):
            x, y = batch(size)
            mse(pipe(x), y).backward()
            mse(expected(x), y).backward()
        assert_same_state(model, expected, rtol=1e-4, atol=1e-5)

    def test_dropout_draws_anew_and_follows_the_seed(self):
        pipe = make_pipe(nn.Sequential(linear(), nn.Dropout(0.5), linear()))
        x = batch()[0]
        torch.manual_seed(3)
        first, second = pipe(x), pipe(x)
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        assert torch.equal(pipe(x), first)

    def test_a_backward_draws_nothing(self):
        pipe = make_pipe(nn.Sequential(linear(), nn.Dropout(0.5), linear()))
        loss = pipe(batch()[0]).sum()
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)

    def test_autocast(self):
        def region(self: Any, h: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.extra[0](h.float()).exp()

        model = Between(region, linear())
        expected = copy.deepcopy(model)
        x, y = batch()
        pipe = make_pipe(model)
        with torch.autocast("cpu", torch.bfloat16):
            out, reference = pipe(x), expected(x)
            loss, wanted = mse(out, y), mse(reference, y)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, reference)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(model.extra[0].weight.grad, expected.extra[0].weight.grad, rtol=1e-6, atol=1e-7)
        assert_same_state(model, expected, rtol=1e-2, atol=1e-3)

    def test_target_free_call_of_a_pipe_with_a_loss(self):
        model = mlp()
        pipe = make_pipe(model, loss_fn=F.mse_loss)
        x, y = batch()
        pipe.step(x, target=y)
        torch.testing.assert_close(pipe(x), model(x))


def test_nothing_is_held_after_the_graph_is_gone():
    pipe = make_pipe(mlp())
    pipe(batch()[0])  # a capture leaves cycles behind, for the garbage collector
    x = batch()[0]
    out = pipe(x)
    reference = weakref.ref(x)
    out.sum().backward()
    del x, out
    assert reference() is None
    gc.collect()

    def tensors() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(isinstance(o, Tensor) for o in gc.get_objects())

    before = tensors()
    for _ in range(5):
        pipe(torch.randn(4, WIDTH)).sum().backward()
        pipe.zero_grad()
    gc.collect()
    assert tensors() <= before


def test_two_pipes_over_one_model():
    model = mlp()
    expected = copy.deepcopy(model)
    first, second = make_pipe(model, 2), twobp_fx.compile(model, 3, compiler="eager", loss_fn=mse)
    x, y = batch(6)
    mse(first(x), y).backward()
    second.step(x, target=y)
    (2 * mse(expected(x), y)).backward()
    assert_same_state(model, expected)
