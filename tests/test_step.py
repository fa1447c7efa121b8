"""`pipe.step` against plain autograd on the same micro-batches: gradients, losses, buffers, random draws, hooks."""

import collections
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import twobp_fx
from tests.helpers import equal
from tests.pipe_helpers import WIDTH, Between, assert_same_state, batch, linear, make_pipe, mlp, mse, plain_step
from twobp_fx import api
from twobp_fx.errors import StageError, TwobpError
from twobp_fx.runtime import gradients, stage

torch.set_num_threads(1)

SCHEDULES = ("naive", "gpipe", "1f1b-1", "1f1b-2")


def assert_step_is_plain(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    stages: Any = 2,
    count: int = 2,
    loss_fn: Callable[[Any, Any], Tensor] | None = mse,
    tolerance: Mapping[str, float] | None = None,
    steps: int = 2,
    **kwargs: Any,
) -> twobp_fx.api.Pipe:
    """Steps of a pipe, split and not, on copies of `model` leave what plain autograd leaves. Returns the last pipe."""
    expected = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [plain_step(expected, *args, target=target, count=count, loss_fn=loss_fn, **kwargs) for _ in range(steps)]
    pipes = []
    for split in (True, False):
        mine = copy.deepcopy(model)
        pipe = make_pipe(mine, stages, loss_fn=loss_fn, microbatches=count, schedule="gpipe", split_backward=split)
        for loss in losses:
            torch.testing.assert_close(pipe.step(*args, target=target, **kwargs), loss, **(tolerance or {}))
        assert_same_state(mine, expected, **(tolerance or {}))
        pipes.append(mine)
    for (name, p), (_, q) in zip(pipes[0].named_parameters(), pipes[1].named_parameters(), strict=True):
        first, second = (g.to_dense() if g is not None and g.is_sparse else g for g in (p.grad, q.grad))
        assert equal(first, second), f"{name}: I and W are not bitwise B"
    return pipe


def assert_plain_or_refused(model: nn.Module, *args: Any, **options: Any) -> None:
    """Exact, or an error of ours: what must never happen is a wrong or missing gradient."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_step_is_plain(model, *args, **options)
    except StageError:
        raise  # refused, but only once the step was running
    except TwobpError:
        pass


def assert_finite_difference(loss: Callable[[], Tensor], parameter: Tensor, gradient: Tensor) -> None:
    """Along one random direction, in float64."""
    direction = torch.randn_like(parameter)
    parameter.data.add_(direction, alpha=1e-6)
    up = loss()
    parameter.data.sub_(direction, alpha=2e-6)
    down = loss()
    parameter.data.add_(direction, alpha=1e-6)
    torch.testing.assert_close((up - down) / 2e-6, (gradient * direction).sum(), rtol=1e-5, atol=1e-6)


class TestModels:
    @pytest.mark.parametrize("stages", [1, 2, 3])
    def test_mlp(self, stages):
        x, y = batch()
        assert_step_is_plain(mlp(), x, target=y, stages=stages)

    def test_convolution_and_batch_norm(self):
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
        ).append(nn.Linear(16, 6))
        x, y = torch.randn(4, 2, 6, 6), torch.randn(4, WIDTH)
        assert_step_is_plain(model, x, target=y, stages=3, tolerance={"rtol": 1e-4, "atol": 1e-5})

    def test_transformer_block(self):
        model = nn.Sequential(linear(), nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True), linear())
        x = torch.randn(4, 3, WIDTH)
        assert_step_is_plain(model, x, target=torch.randn_like(x), stages=3, tolerance={"rtol": 1e-4, "atol": 1e-5})

    @pytest.mark.parametrize("stages", [1, 2, 3])
    def test_tied_weights(self, stages):
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(9, WIDTH)
                self.middle = linear()
                self.head = nn.Linear(WIDTH, 9, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, ids: Tensor) -> Tensor:
                return self.head(self.middle(self.embed(ids)).tanh())

        ids = torch.randint(9, (4, 5))
        assert_step_is_plain(
            Tied(), ids, target=ids, stages=stages, loss_fn=lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())
        )

    @pytest.mark.parametrize("stages", [1, 3])
    def test_a_parameter_used_three_times(self, stages):
        model = Between(lambda self, h: self.extra[0](self.extra[0](h).tanh()).tanh() @ self.extra[0].weight, linear())
        x, y = batch()
        assert_step_is_plain(model, x, target=y, stages=stages)

    def test_an_unused_parameter_stays_none(self):
        model = Between(lambda self, h: h.relu(), linear())
        x, y = batch()
        assert_step_is_plain(model, x, target=y)
        make_pipe(model, loss_fn=mse).step(x, target=y)
        assert model.extra[0].weight.grad is None

    def test_a_stage_behind_a_detach_stays_none(self):
        x, y = batch()
        assert_step_is_plain(Between(lambda self, h: h.detach() + 1), x, target=y)
        assert_step_is_plain(Between(lambda self, h: self.extra[0](h.argmax(1)), nn.Embedding(WIDTH, WIDTH)), x, target=y)

    def test_frozen_parameters(self):
        x, y = batch()
        for frozen in ("0.weight", "2.bias", "4.weight"):
            model = mlp()
            model.get_parameter(frozen).requires_grad_(False)
            assert_step_is_plain(model, x, target=y, stages=3)
        model = mlp()
        model[2].requires_grad_(False)
        assert_step_is_plain(model, x, target=y, stages=3)

    def test_skip_connection_over_two_stages_and_an_input_many_stages_read(self):
        class Skip(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()

            def forward(self, x: Tensor, scale: Tensor) -> Tensor:
                a = self.a(x)
                b = self.b(a).tanh() * scale
                c = self.c(b).tanh() + x
                return self.d(c + a) * scale + b

        x, y = batch()
        scale = torch.randn(4, WIDTH)
        assert_step_is_plain(Skip(), x, scale, target=y, stages=["b", "c", "d"])

    def test_sequence_of_modules(self):
        class Fork(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = linear()

            def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
                return x * scale, self.linear(x)

        class Join(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = linear()

            def forward(self, x: Tensor, h: Tensor) -> Tensor:
                return self.linear(h.tanh()) + x

        modules = [Fork(), Join()]
        expected = copy.deepcopy(modules)
        x, y = batch()
        pipe = twobp_fx.compile(modules, loss_fn=mse, compiler="eager")
        loss = pipe.step(x, target=y, scale=0.5)
        for part, t in zip(x.chunk(2), y.chunk(2), strict=True):
            (mse(expected[1](*expected[0](part, scale=0.5)), t) / 2).backward()
        for module, reference in zip(modules, expected, strict=True):
            assert_same_state(module, reference)
        torch.testing.assert_close(loss, mse(expected[1](*expected[0](x, scale=0.5)), y))

    def test_cuts_by_module_name(self):
        x, y = batch()
        pipe = assert_step_is_plain(mlp(), x, target=y, stages=["2", "4"], count=4)
        assert len(pipe.stages) == 3


class TestArguments:
    def test_nested_keyword_and_plain_arguments(self):
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = linear(), linear()

            def forward(
                self, x: dict[str, Any], pair: tuple[Tensor, list[Tensor]], power: int, *, gain: Tensor, flag: bool
            ) -> Tensor:
                h = self.a(x["x"] * x["scale"]) + pair[0]
                return self.b(h.tanh() ** power) * pair[1][0] + (gain if flag else 0)

        x, y = batch()
        args = (
            {"x": x, "scale": torch.tensor(2.0)},
            (torch.randn(1, WIDTH), [torch.randn(4, 1)]),
            2,
        )
        assert_step_is_plain(Many(), *args, target=y, gain=torch.randn(4, WIDTH), flag=True)

    def test_model_returns_its_loss(self):
        class Returns(nn.Module):
            def __init__(self, kind: str) -> None:
                super().__init__()
                self.net, self.kind = mlp(), kind

            def forward(self, x: Tensor, labels: Tensor) -> Any:
                loss = mse(self.net(x), labels)
                if self.kind == "dict":
                    return {"loss": loss, "extra": x}
                return loss if self.kind == "tensor" else SimpleNamespace(loss=loss)

        x, y = batch()
        for kind in ("tensor", "dict", "object"):
            assert_step_is_plain(Returns(kind), x, labels=y, loss_fn=None)

    def test_structured_output_and_target(self):
        model = Between(lambda self, h: h.tanh())
        x, y = batch()

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                h = self.net(x)
                return {"a": h, "b": h * 2}

        assert_step_is_plain(
            Wrapped(), x, target=(y, {"w": torch.tensor(0.5)}), loss_fn=lambda o, t: mse(o["a"], t[0]) + t[1]["w"] * o["b"].mean()
        )

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.randn(WIDTH, 4).t(),
            lambda: torch.randn(4, 2 * WIDTH)[:, ::2],
            lambda: torch.randn(1, WIDTH).expand(4, WIDTH),
            lambda: torch.randn(4, 1).expand(4, WIDTH),
            lambda: torch.randn(8, WIDTH)[::2],
            lambda: torch.randn(3 + WIDTH).unfold(0, WIDTH, 1),
        ],
        ids=["transposed", "strided", "expanded rows", "expanded columns", "every other row", "sliding window"],
    )
    def test_layouts(self, make):
        """In either order: what was captured for one layout runs on another."""
        y = torch.randn(4, WIDTH)
        odd, plain = make(), torch.randn(4, WIDTH)
        for first, second in ((odd, plain), (plain, odd)):
            model = mlp()
            expected = copy.deepcopy(model)
            pipe = make_pipe(model, loss_fn=mse)
            for x in (first, second):
                torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse))
            assert_same_state(model, expected)

    @pytest.mark.parametrize("count", [1, 2])
    def test_one_tensor_given_twice_and_two_tensors_after_it(self, count):
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = linear(), linear()

            def forward(self, x: Tensor, z: Tensor) -> Tensor:
                return self.b(self.a(x) * z)

        model = Two()
        expected = copy.deepcopy(model)
        pipe = make_pipe(model, loss_fn=mse, schedule="gpipe", microbatches=count)
        x, y = batch()
        for args, target in (((x, x), x), ((x, torch.randn_like(x)), x), ((x, torch.randn_like(x)), y)):
            torch.testing.assert_close(
                pipe.step(*args, target=target), plain_step(expected, *args, target=target, count=count, loss_fn=mse)
            )
        assert_same_state(model, expected)

    @pytest.mark.parametrize("count", [1, 2])
    def test_inputs_that_require_grad(self, count):
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = linear(), linear()

            def forward(self, x: Tensor, shared: Tensor, scale: Tensor) -> Tensor:
                return self.b((self.a(x) + shared) * scale) + x

        model = Two()
        expected = copy.deepcopy(model)
        y = torch.randn(4, WIDTH)
        given = [torch.randn(4, WIDTH), torch.randn(1, WIDTH), torch.tensor(0.5)]
        mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
        pipe = make_pipe(model, loss_fn=mse, schedule="gpipe", microbatches=count)
        for _ in range(2):
            pipe.step(*mine, target=y)
            plain_step(expected, *theirs, target=y, count=count, loss_fn=mse)
        assert_same_state(model, expected)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    @pytest.mark.parametrize("same", [True, False])
    def test_inputs_out_of_one_graph(self, same):
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = linear(), linear()

            def forward(self, x: Tensor, z: Tensor) -> Tensor:
                return self.b(self.a(x).tanh()) * z

        def inputs(encoder: nn.Module) -> tuple[Tensor, Tensor]:
            first, second = encoder(x).tanh().chunk(2, dim=1)
            return (first, first) if same else (first, second)

        x, y = batch()
        encoder, model = nn.Linear(WIDTH, 2 * WIDTH), Two()
        expected_encoder, expected = copy.deepcopy(encoder), copy.deepcopy(model)
        make_pipe(model, loss_fn=mse).step(*inputs(encoder), target=y)
        first, second = inputs(expected_encoder)
        losses = [mse(expected(a, b), t) / 2 for a, b, t in zip(first.chunk(2), second.chunk(2), y.chunk(2), strict=True)]
        torch.stack(losses).sum().backward()
        assert_same_state(model, expected)
        assert_same_state(encoder, expected_encoder)

    def test_a_new_function_as_argument_is_another_capture(self):
        model = Between(lambda self, h: h)
        model.forward = lambda x, function: model.last(function(model.first(x)))
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        for gain in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):  # CPython gives each the address of an earlier one
            expected = mse(model(x, lambda t, gain=gain: t * gain), y)
            torch.testing.assert_close(pipe.step(x, lambda t, gain=gain: t * gain, target=y), expected)


class TestGradients:
    def test_adds_to_what_is_there_and_keeps_the_object(self):
        x, y = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        before = {name: p.grad for name, p in model.named_parameters()}
        values = {name: g.clone() for name, g in before.items()}
        pipe.step(x, target=y)
        for name, p in model.named_parameters():
            assert p.grad is before[name]
            torch.testing.assert_close(p.grad, 2 * values[name])

    def test_gradients_share_no_memory(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        x, y = batch()
        make_pipe(model, loss_fn=lambda o, t: o.sum() + model[0].bias.sum() + model[1].bias.sum()).step(x, target=y)
        for p in model.parameters():
            others = [q.grad.clone() for q in model.parameters() if q is not p]
            p.grad.add_(1)
            assert all(equal(q.grad, kept) for q, kept in zip((q for q in model.parameters() if q is not p), others, strict=True))

    def test_hooks_fire_once_a_step_and_may_change_the_gradient(self):
        x, y = batch()
        model = mlp()
        expected = copy.deepcopy(model)
        calls: list[str] = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: (calls.append(f"hook {name}"), g * 2)[1])
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"post {name}"))
        for p in expected.parameters():
            p.register_hook(lambda g: g * 2)
        pipe = make_pipe(model, loss_fn=mse)
        for _ in range(2):
            pipe.step(x, target=y)
            plain_step(expected, x, target=y, loss_fn=mse)
            assert sorted(calls) == sorted(f"{kind} {name}" for kind in ("hook", "post") for name, _ in model.named_parameters())
            calls.clear()
        assert_same_state(model, expected)

    def test_what_the_stages_summed_becomes_the_gradient_without_a_copy(self, monkeypatch):
        """A weight that two stages share among them: it gets one of the two buffers, with the other added."""
        made = []

        def new_buffer(like):
            buffer = gradients.new_buffer(like)
            made.append(buffer.data_ptr())  # and no reference, for which autograd would copy it
            return buffer

        monkeypatch.setattr(stage, "new_buffer", new_buffer)
        x, y = batch()
        model = mlp()
        model[4].weight = model[0].weight
        expected = copy.deepcopy(model)
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(model, expected)
        assert len(made) == len(list(model.parameters())) + 1
        assert {p.grad.data_ptr() for p in model.parameters()} <= set(made)

    def test_hooks_on_tied_parameters_fire_once(self):
        model = nn.Sequential(linear(), nn.Tanh(), linear())
        model[2].weight = model[0].weight
        calls: list[Tensor] = []
        model[0].weight.register_post_accumulate_grad_hook(calls.append)
        x, y = batch()
        make_pipe(model, loss_fn=mse).step(x, target=y)
        assert len(calls) == 1

    def test_optimizer_and_clipping_over_epochs(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(), linear())
        expected = copy.deepcopy(model)
        pipe = make_pipe(model, loss_fn=mse)
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
        optimizers = [torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in (pipe.parameters(), expected.parameters())]
        for _ in range(8):
            x, y = batch(8)
            losses = []
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(pipe.step(x, target=y))
            losses.append(plain_step(expected, x, target=y, loss_fn=mse))
            for optimizer, owner in zip(optimizers, (pipe, expected), strict=True):
                nn.utils.clip_grad_norm_(owner.parameters(), 0.5)
                optimizer.step()
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=1e-4, atol=1e-5)

    def test_loss_is_a_detached_number(self):
        x, y = batch()
        loss = make_pipe(mlp(), loss_fn=mse).step(x, target=y)
        assert loss.dim() == 0
        assert not loss.requires_grad

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_split_is_bitwise_unsplit(self, schedule):
        model = nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.GELU(), linear(), nn.Dropout(0.3), nn.Tanh(), linear())
        x, y = batch(8)
        results = []
        for split in (True, False):
            mine = copy.deepcopy(model)
            torch.manual_seed(3)
            pipe = make_pipe(mine, 4 if schedule != "1f1b-2" else 2, loss_fn=mse, schedule=schedule, split_backward=split)
            results.append([pipe.step(x, target=y), *(p.grad for p in mine.parameters())])
        assert all(equal(a, b) for a, b in zip(*results, strict=True))


class TestStateOfTheModel:
    def test_state_dict_is_the_models(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        keys = list(model.state_dict())
        pipe = make_pipe(model, loss_fn=nn.MSELoss())
        assert list(pipe.state_dict()) == keys
        assert list(model.state_dict()) == keys
        x, y = batch()
        pipe.step(x, target=y)
        saved = {key: value.clone() for key, value in pipe.state_dict().items()}
        fresh = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        other = make_pipe(fresh, loss_fn=nn.MSELoss())
        other.load_state_dict(saved)
        torch.testing.assert_close(other.step(x, target=y), pipe.step(x, target=y))
        other.load_state_dict({key: value.clone() for key, value in saved.items()}, assign=True)
        model.load_state_dict(saved)
        torch.testing.assert_close(other.step(x, target=y), pipe.step(x, target=y))

    def test_extra_state_and_hooks_of_the_root_are_kept(self):
        class Versioned(nn.Sequential):
            version = 1

            def get_extra_state(self) -> dict[str, int]:
                return {"version": self.version}

            def set_extra_state(self, state: dict[str, int]) -> None:
                self.version = state["version"]

        model = Versioned(linear(), linear())
        pipe = make_pipe(model)
        assert list(pipe.state_dict()) == list(model.state_dict())
        saved = pipe.state_dict()
        saved["_extra_state"] = {"version": 2}
        pipe.load_state_dict(saved)
        assert model.version == 2

    def test_compiling_leaves_the_model_alone(self):
        model = nn.Sequential(linear(), nn.ReLU(), linear())
        children, attributes = list(model.named_modules()), set(vars(model))
        x, y = batch()
        make_pipe(model, loss_fn=nn.MSELoss()).step(x, target=y)
        assert list(model.named_modules()) == children
        assert set(vars(model)) == attributes
        torch.testing.assert_close(model(x), model[2](model[1](model[0](x))))

    @pytest.mark.parametrize("name", ["plan", "stages", "model", "step", "_cut", "_loss_fn", "_latest", "loss_fn"])
    def test_names_of_the_models_children_do_not_matter(self, name):
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.add_module(name, linear())
                self.other = linear()

            def forward(self, x: Tensor) -> Tensor:
                return self.other(self.get_submodule(name)(x))

        x, y = batch()
        assert_step_is_plain(Named(), x, target=y)

    def test_train_and_eval_reach_the_model(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), linear())
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        assert pipe.eval() is pipe
        assert not any(module.training for module in model.modules())
        model.zero_grad()
        expected = copy.deepcopy(model)
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse))
        assert_same_state(model, expected)
        assert model[1].num_batches_tracked == 2
        pipe.train()
        pipe.step(x, target=y)
        assert model[1].num_batches_tracked == 4

    def test_one_module_in_eval_mode(self):
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        model[1].eval()
        model.zero_grad()
        expected = copy.deepcopy(model)
        pipe.step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(model, expected)

    def test_batch_norm_statistics(self):
        x, y = batch(8)
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, momentum=0.3), nn.ReLU(), linear(), nn.BatchNorm1d(WIDTH), linear())
        assert_step_is_plain(model, x, target=y, stages=3, count=4, steps=3, tolerance={"rtol": 1e-4, "atol": 1e-5})

    def test_captures_once_a_signature(self, monkeypatch):
        captures = []
        original = api.capture_forward
        monkeypatch.setattr(api, "capture_forward", lambda *a, **k: (captures.append(1), original(*a, **k))[1])
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        for size, seen in ((4, 1), (4, 1), (8, 2), (4, 2), (8, 2)):
            x, y = batch(size)
            model.zero_grad()
            expected = copy.deepcopy(model)
            pipe.step(x, target=y)
            plain_step(expected, x, target=y, loss_fn=mse)
            assert_same_state(model, expected)
            assert len(captures) == seen
        pipe.to(torch.float64)
        model.zero_grad()
        expected = copy.deepcopy(model)
        for _ in range(2):
            pipe.step(x.double(), target=y.double())
            plain_step(expected, x.double(), target=y.double(), loss_fn=mse)
        assert_same_state(model, expected)
        assert model[0].weight.grad.dtype == torch.float64
        assert len(captures) == 3

    def test_captures_no_more_for_attributes_that_do_not_matter(self, monkeypatch):
        captures = []
        original = api.capture_forward
        monkeypatch.setattr(api, "capture_forward", lambda *a, **k: (captures.append(1), original(*a, **k))[1])

        def function(self: Any, h: Tensor) -> Tensor:
            self.kept = h.detach()
            return h * self.gains[0] * self.config["gain"]

        model = Between(function)
        model.gains, model.config = [2.0], {"gain": 3.0}
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        for _ in range(3):
            pipe.step(x, target=y)
        assert len(captures) == 1
        for _ in range(3):  # now `kept` exists, and is another tensor after every plain call
            model(x)
            pipe.step(x, target=y)
        assert len(captures) <= 2

    def test_a_copy_of_a_pipe_is_a_pipe_of_a_copy(self):
        x, y = batch()
        pipe = make_pipe(mlp(), loss_fn=mse)
        pipe.step(x, target=y)
        other = copy.deepcopy(pipe)
        pipe.zero_grad()
        other.zero_grad()
        expected = copy.deepcopy(other.model)
        other.step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(other.model, expected)
        assert all(p.grad is None for p in pipe.parameters())
        assert [id(p) for p in other.parameters()] == [id(p) for p in other.model.parameters()]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtypes(self, dtype):
        x, y = batch()
        tolerance = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-9}
        assert_step_is_plain(mlp().to(dtype), x.to(dtype), target=y.to(dtype), tolerance=tolerance)

    @pytest.mark.parametrize("stages", [1, 2])
    def test_gradients_in_another_dtype_than_the_parameters(self, stages):
        """Where a parameter's grad_dtype says so; and as soon as it says so."""
        x, y = (each.bfloat16() for each in batch(8))
        model = mlp().bfloat16()
        pipe = make_pipe(model, stages, loss_fn=mse, microbatches=4, schedule="gpipe")
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for p in model.parameters():
                p.grad_dtype = dtype
            expected = mlp().bfloat16()  # a deep copy of a parameter forgets its grad_dtype
            expected.load_state_dict(model.state_dict())
            for p in expected.parameters():
                p.grad_dtype = dtype
            for _ in range(2):
                pipe.step(x, target=y)
                plain_step(expected, x, target=y, count=4, loss_fn=mse)
            for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert p.grad.dtype == q.grad.dtype == dtype, name
                if dtype == torch.bfloat16:
                    torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-3)
                else:  # the sums are not rounded to bfloat16 on the way, so what is left is how matrix products are rounded
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4)
            model.zero_grad()

    def test_complex(self):
        class Complex(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = linear(), linear()
                self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

            def forward(self, x: Tensor) -> Tensor:
                return self.last(torch.view_as_real(torch.fft.fft(self.first(x)) * self.weight).sum(-1))

        x, y = batch()
        assert_step_is_plain(Complex(), x, target=y, stages=3, tolerance={"rtol": 1e-4, "atol": 1e-5})


class TestAutocast:
    def run(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        x, y = batch()
        expected = copy.deepcopy(model)
        pipe = make_pipe(model, loss_fn=mse)
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(x, target=y)
        losses = []
        for part, t in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(mse(expected(part), t))
            (losses[-1] / 2).backward()
        torch.testing.assert_close(loss, torch.stack(losses).mean())
        return model, expected

    def test_around_a_step(self):
        model, expected = self.run(mlp())
        assert_same_state(model, expected, rtol=1e-2, atol=1e-3)
        assert model[0].weight.grad.dtype == torch.float32

    def test_a_region_kept_in_full_precision(self):
        def region(self: Any, h: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.extra[0](h.float()).exp()

        model, expected = self.run(Between(region, linear()))
        torch.testing.assert_close(model.extra[0].weight.grad, expected.extra[0].weight.grad, rtol=1e-6, atol=1e-7)
        assert_same_state(model, expected, rtol=1e-2, atol=1e-3)

    def test_off_again(self):
        x, y = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, target=y)
        model.zero_grad()
        expected = copy.deepcopy(model)
        pipe.step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(model, expected)


class TestLossFunctions:
    def test_modules(self):
        x, y = batch()
        assert_step_is_plain(mlp(), x, target=y, loss_fn=nn.MSELoss())
        assert_step_is_plain(mlp(), x, target=torch.randint(WIDTH, (4,)), loss_fn=nn.CrossEntropyLoss(torch.rand(WIDTH)))

    def test_modules_with_parameters_of_their_own(self):
        class Learned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.rand(WIDTH))
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, output: Tensor, target: Tensor) -> Tensor:
                self.calls.add_(1)
                loss = ((output - target) * self.weight).square().mean()
                return loss * 2 if self.training else loss

        class Clash(nn.Module):
            """Has a child called like what the pipe may call the loss function."""

            def __init__(self) -> None:
                super().__init__()
                self.first, self.loss_fn = linear(), nn.Linear(WIDTH, WIDTH, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.loss_fn(self.first(x))

        x, y = batch()
        for model in (mlp(), Clash()):
            loss_fn = Learned()
            expected, expected_loss_fn = copy.deepcopy(model), copy.deepcopy(loss_fn)
            pipe = make_pipe(model, loss_fn=loss_fn)
            for _ in range(2):
                torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=expected_loss_fn))
            assert_same_state(model, expected)
            assert_same_state(loss_fn, expected_loss_fn)
            loss_fn.eval()
            expected_loss_fn.eval()
            loss_fn.weight.requires_grad_(False)
            expected_loss_fn.weight.requires_grad_(False)
            torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=expected_loss_fn))
            assert_same_state(model, expected)
            assert_same_state(loss_fn, expected_loss_fn)

    def test_a_penalty_on_the_models_own_parameters(self):
        x, y = batch()
        model = mlp()
        expected = copy.deepcopy(model)
        make_pipe(model, loss_fn=lambda o, t: mse(o, t) + model[0].weight.square().sum()).step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=lambda o, t: mse(o, t) + expected[0].weight.square().sum())
        assert_same_state(model, expected)

    def test_a_frozen_teacher_under_no_grad(self):
        teacher = linear()

        def distill(output: Tensor, target: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(target)
            return mse(output, wanted)

        x, y = batch()
        model = mlp()
        expected = copy.deepcopy(model)
        make_pipe(model, loss_fn=distill).step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=distill)
        assert_same_state(model, expected)
        assert teacher.weight.grad is None

    def test_a_closure_that_changes(self):
        temperature = 1.0
        weights = [1.0]
        model = mlp()

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return mse(output, target) * temperature * weights[0]

        x, y = batch()
        pipe = make_pipe(model, loss_fn=loss_fn)
        first = pipe.step(x, target=y)
        temperature = 2.0
        torch.testing.assert_close(pipe.step(x, target=y), 2 * first)
        weights[0] = 3.0
        torch.testing.assert_close(pipe.step(x, target=y), 6 * first)

    def test_a_loss_left_on_the_model_by_its_forward(self):
        class Auxiliary(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = linear(), linear()

            def forward(self, x: Tensor) -> Tensor:
                h = self.first(x)
                self.auxiliary = h.square().mean()
                return self.last(h)

        model, expected = Auxiliary(), Auxiliary()
        expected.load_state_dict(model.state_dict())
        pipe = make_pipe(model, loss_fn=lambda o, t: mse(o, t) + model.auxiliary)
        for size in (4, 8, 4):
            x, y = batch(size)
            pipe.step(x, target=y)
            plain_step(expected, x, target=y, loss_fn=lambda o, t: mse(o, t) + expected.auxiliary)
        assert_same_state(model, expected)

    def test_parameters_the_pipe_cannot_see_are_refused(self):
        """Eager gives them a gradient; a captured graph would hold them as constants."""
        critic = nn.Linear(WIDTH, 1)
        x, y = batch()
        with pytest.raises(TwobpError, match=r"requires? a? ?grad"):
            make_pipe(mlp(), loss_fn=lambda o, t: critic(o).mean()).step(x, target=y)

        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = linear(), linear()
                self.middle = [linear()]  # no ModuleList: torch does not register it

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.middle[0](self.first(x)))

        with pytest.raises(TwobpError, match=r"requires? a? ?grad"):
            make_pipe(Hidden(), loss_fn=mse).step(x, target=y)

        class Attribute(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = linear(), linear()
                self.scale = torch.ones(WIDTH, requires_grad=True)

            def forward(self, x: Tensor) -> Tensor:
                return self.last(self.first(x) * self.scale)

        with pytest.raises(TwobpError, match=r"requires? a? ?grad"):
            make_pipe(Attribute(), loss_fn=mse).step(x, target=y)


class TestRandomDraws:
    def model(self) -> nn.Module:
        return nn.Sequential(linear(), nn.Dropout(0.4), nn.ReLU(), linear(), nn.Dropout(0.4), linear(), nn.Dropout(0.2), linear())

    def test_depend_on_the_seed_alone(self):
        """The same over schedules, split or not, and over repeated runs, whatever the threads' timing."""
        model = self.model()
        x, y = batch(8)
        first: list[Tensor] | None = None
        for schedule, split in [(s, b) for s in ("naive", "gpipe", "1f1b") for b in (True, False)] + [("1f1b", True)] * 3:
            mine = copy.deepcopy(model)
            torch.manual_seed(11)
            pipe = make_pipe(mine, ["3", "5"], loss_fn=mse, schedule=schedule, microbatches=4, split_backward=split)
            results = [pipe.step(x, target=y), pipe.step(x, target=y), *(p.grad for p in mine.parameters())]
            first = first or results
            assert not equal(results[0], results[1]), "two steps drew the same"
            assert all(equal(a, b) for a, b in zip(results, first, strict=True)), (schedule, split)

    def test_leave_the_global_state_alone_if_the_model_draws_nothing(self):
        x, y = batch()
        pipe = make_pipe(mlp(), loss_fn=mse)
        before = torch.get_rng_state()
        pipe.step(x, target=y)
        pipe(x).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)

    def test_microbatches_and_layers_draw_differently(self):
        model = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
        with torch.no_grad():
            model[0].weight.fill_(0)
            model[0].bias.fill_(1)
            model[2].weight.copy_(torch.eye(64))
            model[2].bias.fill_(1)
        seen = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return (output * target).sum()

        pipe = make_pipe(model, ["2"], loss_fn=loss_fn, schedule="gpipe", microbatches=2)
        x = torch.zeros(2, 1)
        pipe.step(x, target=torch.ones(2, 64))
        # d loss / d bias of the last linear is the last mask, summed over micro-batches, over 2.
        last = model[2].bias.grad.clone()
        seen.append(last)
        assert set(last.unique().tolist()) == {0.0, 1.0, 2.0}, "equal masks in both micro-batches"
        first = model[0].bias.grad
        assert not torch.equal(first > 0, last > 0)

    def test_gradient_belongs_to_the_draw(self):
        """Finite differences in float64 under one seed."""
        model = self.model().double()
        x, y = torch.randn(4, WIDTH).double(), torch.randn(4, WIDTH).double()
        pipe = make_pipe(model, ["3", "5"], loss_fn=lambda o, t: (o - t).square().mean(), schedule="1f1b", microbatches=2)

        def loss() -> Tensor:
            torch.manual_seed(5)
            model.zero_grad()
            return pipe.step(x, target=y)

        loss()
        gradients = [p.grad.clone() for p in model.parameters()]
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            assert_finite_difference(loss, p, gradient)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_inside_a_checkpointed_region(self, reentrant):
        def region(self: Any, h: Tensor) -> Tensor:
            return h + torch.utils.checkpoint.checkpoint(lambda t: F.dropout(self.extra[0](t), 0.5), h, use_reentrant=reentrant)

        model = Between(region, linear()).double()
        x, y = torch.randn(4, WIDTH).double(), torch.randn(4, WIDTH).double()
        pipe = make_pipe(model, loss_fn=lambda o, t: (o - t).square().mean())

        def loss() -> Tensor:
            torch.manual_seed(5)
            model.zero_grad()
            return pipe.step(x, target=y)

        try:
            loss()
        except TwobpError:
            return
        assert_finite_difference(loss, model.extra[0].weight, model.extra[0].weight.grad.clone())


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _OfTorch(_Straight):
    """As torch.distributed's collectives: torch's own, and no derivative of its forward."""


_OfTorch.__module__ = "torch.distributed.nn.functional"

_straight = _Straight.apply  # the usual idiom: bound before anything is compiled


def _in_place(self: Any, h: Tensor) -> Tensor:
    h = h * 1
    h[:, 0] = 0
    h[:, 1].mul_(3)
    h += 1
    return h.relu_()


def _no_grad_region(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        z = self.extra[0](h)
        w = self.extra[0].weight
    return h * z * self.extra[0](h) * w.sum()


def _average(self: Any, h: Tensor) -> Tensor:
    self.state.mul_(0.9).add_(h.detach().mean(0) * 0.1)
    return h - self.state


def _average_assigned(self: Any, h: Tensor) -> Tensor:
    self.state = self.state * 0.9 + h.detach().mean(0) * 0.1
    return h - self.state


def _average_in_a_view(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.state[0].add_(h.mean())
    return h - self.state


def _average_of_data(self: Any, h: Tensor) -> Tensor:
    self.state.data = self.state * 0.5 + h.detach().mean(0)
    return h - self.state


def _average_no_grad(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.state.mul_(0.5).add_(h.mean(0))
    return h - self.state


def _clamp_parameter(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.extra[0].weight.clamp_(-0.1, 0.1)
    return self.extra[0](h)


def _clamp_parameter_view(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.extra[0].weight[0].mul_(0.5)
    return self.extra[0](h)


def _clamp_parameter_data(self: Any, h: Tensor) -> Tensor:
    self.extra[0].weight.data.clamp_(-0.1, 0.1)
    return self.extra[0](h)


def _count_calls(self: Any, h: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return h * self.calls


def _carry(self: Any, h: Tensor) -> Tensor:
    before = getattr(self, "carried", torch.zeros(WIDTH))
    self.carried = h.detach().mean(0)
    return h + before


def _cache(self: Any, h: Tensor) -> Tensor:
    if getattr(self, "cached", None) is None:
        self.cached = h.detach().mean(0)
    return h + self.cached


def _checkpoint(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def region(self: Any, h: Tensor) -> Tensor:
        return h + torch.utils.checkpoint.checkpoint(lambda t: self.extra[0](t).tanh(), h, use_reentrant=reentrant)

    return region


def _once(self: Any, h: Tensor) -> Tensor:
    return self.extra[0](h)


EXACT: Mapping[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: Between(_once, parametrizations.spectral_norm(linear())),
    "weight norm": lambda: Between(_once, parametrizations.weight_norm(linear())),
    "orthogonal": lambda: Between(_once, parametrizations.orthogonal(linear())),
    "checkpoint": lambda: Between(_checkpoint(False), linear()),
    "detached branch": lambda: Between(lambda self, h: h + self.extra[0](h.detach()), linear()),
    "no_grad region": lambda: Between(_no_grad_region, linear()),
    "in-place on activations": lambda: Between(_in_place),
    "gru cell twice": lambda: Between(lambda self, h: self.extra[0](h, self.extra[0](h)), nn.GRUCell(WIDTH, WIDTH)),
    "norm twice": lambda: Between(lambda self, h: self.extra[0](self.extra[0](h) * 2), nn.BatchNorm1d(WIDTH)),
    "constant": lambda: Between(lambda self, h: h * torch.tensor([1.0, 2, 3, 4, 5, 6])),
    "round": lambda: Between(lambda self, h: h + torch.round(h)),
    "svd": lambda: Between(lambda self, h: h @ torch.linalg.svd(self.extra[0].weight)[1].diag(), linear()),
    "lstm": lambda: Between(lambda self, h: self.extra[0](h[:, None])[0][:, 0], nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    "buffer average": lambda: Between(_average, buffer=torch.zeros(WIDTH)),
    "buffer average under no_grad": lambda: Between(_average_no_grad, buffer=torch.zeros(WIDTH)),
}

EXACT_OR_REFUSED: Mapping[str, Callable[[], nn.Module]] = {
    "reentrant checkpoint": lambda: Between(_checkpoint(True), linear()),
    "state carried from call to call": lambda: Between(_carry),
    "cache made at the first call": lambda: Between(_cache),
    "cond": lambda: Between(lambda self, h: torch.cond(h.sum() > 0, lambda t: t * 2, lambda t: t * 3, (h,))),
    "boolean index": lambda: Between(lambda self, h: h * h[h > 0].mean()),
    "item": lambda: Between(lambda self, h: h * h.detach().abs().max().item()),
    "autograd.Function": lambda: Between(lambda self, h: _Straight.apply(h)),
    "autograd.Function of torch's own": lambda: Between(lambda self, h: _OfTorch.apply(h)),
    "autograd.Function, bound": lambda: Between(lambda self, h: _straight(h)),
    "buffer assigned": lambda: Between(_average_assigned, buffer=torch.zeros(WIDTH)),
    "buffer written through a view": lambda: Between(_average_in_a_view, buffer=torch.zeros(WIDTH)),
    "buffer data": lambda: Between(_average_of_data, buffer=torch.zeros(WIDTH)),
    "parameter written": lambda: Between(_clamp_parameter, linear()),
    "parameter written through a view": lambda: Between(_clamp_parameter_view, linear()),
    "parameter data": lambda: Between(_clamp_parameter_data, linear()),
    "python counter": lambda: Between(_count_calls),
    "cumulative norm": lambda: Between(_once, nn.BatchNorm1d(WIDTH, momentum=None)),
}


class TestUnusualModels:
    def test_an_lstm_over_inputs_without_a_gradient(self):
        class Tagger(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
                self.head = linear()

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.lstm(x)[0])

        x = torch.randn(4, 3, WIDTH)
        assert_step_is_plain(Tagger(), x, target=torch.randn_like(x), tolerance={"rtol": 1e-4, "atol": 1e-5})

    def test_state_carried_over_from_a_plain_call(self):
        model = Between(_carry)
        x, y = batch()
        model(x)
        pipe = make_pipe(model, loss_fn=mse)
        try:
            losses = [pipe.step(x, target=y) for _ in range(2)]
        except StageError:
            raise
        except TwobpError:
            return
        expected = copy.deepcopy(model)
        assert equal(losses[1], plain_step(expected, x, target=y, loss_fn=mse))

    @pytest.mark.parametrize("name", EXACT)
    def test_exact(self, name):
        x, y = batch()
        assert_step_is_plain(EXACT[name](), x, target=y, tolerance={"rtol": 1e-4, "atol": 1e-5})

    @pytest.mark.parametrize("name", EXACT_OR_REFUSED)
    def test_exact_or_refused(self, name):
        x, y = batch()
        assert_plain_or_refused(EXACT_OR_REFUSED[name](), x, target=y, tolerance={"rtol": 1e-4, "atol": 1e-5})

    @pytest.mark.parametrize(
        "options", [{"sparse": True}, {"max_norm": 0.1}, {"padding_idx": 1}, {"scale_grad_by_freq": True}], ids=str
    )
    def test_embeddings(self, options):
        ids = torch.tensor([[0, 1], [2, 2], [1, 3], [4, 0]])
        model = nn.Sequential(nn.Embedding(5, WIDTH, **options), linear())
        assert_plain_or_refused(model, ids, target=torch.randn(4, 2, WIDTH))


class TestEditedAfterwards:
    """A model that was changed between steps: the next step is the changed model's."""

    def check(self, change: Callable[[Any], Any], model: nn.Module | None = None) -> None:
        model = model or Between(lambda self, h: self.extra[0](h) * getattr(self, "gain", 1.0), nn.Tanh())
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        change(model)
        model.zero_grad()
        expected = copy.deepcopy(model)
        try:
            loss = pipe.step(x, target=y)
        except StageError:
            raise
        except TwobpError:
            return
        torch.testing.assert_close(loss, plain_step(expected, x, target=y, loss_fn=mse))
        assert_same_state(model, expected)

    def test_parameter_replaced(self):
        self.check(lambda m: setattr(m.last, "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))))

    def test_parameter_frozen(self):
        self.check(lambda m: m.last.weight.requires_grad_(False))

    def test_parameter_data_changed(self):
        self.check(lambda m: m.first.weight.data.mul_(2))

    def test_weights_tied(self):
        self.check(lambda m: setattr(m.last, "weight", m.first.weight))

    def test_weights_untied(self):
        model = Between(lambda self, h: h.tanh())
        model.last.weight = model.first.weight
        self.check(lambda m: setattr(m.last, "weight", nn.Parameter(m.last.weight.detach().clone())), model)

    def test_module_replaced(self):
        self.check(lambda m: m.extra.__setitem__(0, nn.ReLU()))

    def test_attribute_changed(self):
        self.check(lambda m: setattr(m, "gain", 3.0))

    @pytest.mark.parametrize("kind", ["list", "dict", "object", "set", "deque"])
    def test_what_an_attribute_holds_changed(self, kind):
        held: Any = {
            "list": [1.0],
            "dict": {"k": 1.0},
            "object": SimpleNamespace(k=1.0),
            "set": {1.0},
            "deque": collections.deque([1.0]),
        }[kind]
        read = {"dict": lambda v: v["k"], "object": lambda v: v.k}.get(kind, sum)
        model = Between(lambda self, h: h * read(self.config))
        model.config = held

        def change(model: Any) -> None:
            if kind == "object":
                held.k = 3.0
            elif kind == "set":
                held.add(2.0)
            else:
                held["k" if kind == "dict" else 0] = 3.0

        self.check(change, model)

    def test_dropout_rate_changed(self):
        model = Between(lambda self, h: self.extra[0](h), nn.Dropout(0.5))
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        model.extra[0].p = 0.0
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(copy.deepcopy(model), x, target=y, loss_fn=mse))

    def test_tensor_attribute_changed(self):
        def change(model: Any) -> None:
            model.gain.mul_(3)

        model = Between(lambda self, h: h * self.gain)
        model.gain = torch.ones(WIDTH)
        self.check(change, model)

    def test_tensor_attribute_replaced(self):
        model = Between(lambda self, h: h * self.gain)
        model.gain = torch.ones(WIDTH)
        self.check(lambda m: setattr(m, "gain", torch.zeros(WIDTH)), model)

    def test_forward_hook_added(self):
        self.check(lambda m: m.extra[0].register_forward_hook(lambda module, args, output: output * 5))

    def test_forward_pre_hook_added(self):
        self.check(lambda m: m.extra[0].register_forward_pre_hook(lambda module, args: (args[0] * 5,)))

    @pytest.mark.filterwarnings("ignore:Full backward hook")
    def test_backward_hook_added(self):
        self.check(lambda m: m.extra[0].register_full_backward_hook(lambda module, gi, go: (gi[0] * 5,)))

    def test_parametrization_added(self):
        self.check(lambda m: parametrizations.weight_norm(m.first))


def test_a_sequence_of_sizes_through_one_pipe():
    """Cached captures do not mix up: sizes, modes and targets in turn, against plain autograd."""
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), linear())
    expected = copy.deepcopy(model)
    pipe = make_pipe(model, loss_fn=mse)
    sizes: Sequence[int] = (4, 8, 4, 12, 8)
    for i, size in enumerate(sizes):
        x, y = batch(size)
        pipe.train(i % 2 == 0)
        expected.train(i % 2 == 0)
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse), rtol=1e-4, atol=1e-5)
        assert_same_state(model, expected, rtol=1e-4, atol=1e-5)


@dataclass
class _Never:
    """Kept out of pytree: an opaque leaf."""

    factor: float


def test_an_opaque_argument_is_read_again_when_it_is_another_object():
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor, never: _Never) -> Tensor:
            return self.b(self.a(x) * never.factor)

    model = Opaque()
    x, y = batch()
    pipe = make_pipe(model, loss_fn=mse)
    for factor in (1.0, 2.0, 3.0):  # CPython gives each the address of the one before
        loss = pipe.step(x, _Never(factor), target=y)
        torch.testing.assert_close(loss, mse(model(x, _Never(factor)), y))


class TestFoundByBreaking:
    def test_one_module_at_two_places(self):
        shared = nn.Linear(WIDTH, WIDTH)
        x, y = batch()
        assert_step_is_plain(nn.Sequential(shared, nn.Tanh(), linear(), shared), x, target=y)

    def test_torch_func_in_the_forward(self):
        x, y = batch()
        model = Between(lambda self, h: h + torch.func.grad(lambda t: t.sin().sum())(h))
        assert_plain_or_refused(model, x, target=y)
        assert_plain_or_refused(Between(lambda self, h: torch.func.vmap(torch.sin)(h)), x, target=y)
        assert_plain_or_refused(Between(lambda self, h: torch.func.jvp(torch.sin, (h,), (h,))[1]), x, target=y)
        assert_step_is_plain(mlp(), x, target=y)  # nothing of it is left behind

    def test_two_inputs_of_one_shape_on_named_devices(self):
        x, y = batch()
        model = mlp()
        expected = copy.deepcopy(model)
        pipe = twobp_fx.compile(model, 2, loss_fn=mse, compiler="eager", devices=["cpu", "cpu"])
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse))
        assert_same_state(model, expected)

    def test_reentrant_checkpoint_before_a_no_grad_region(self):
        def region(self: Any, h: Tensor) -> Tensor:
            h = torch.utils.checkpoint.checkpoint(self.extra[0], h, use_reentrant=True)
            with torch.no_grad():
                scale = h.abs().mean()
            return h / scale

        x, y = batch()
        assert_step_is_plain(Between(region, linear()), x, target=y)

    def test_containers_are_the_models_own_afterwards(self, monkeypatch):
        captures = []
        original = api.capture_forward
        monkeypatch.setattr(api, "capture_forward", lambda *a, **k: (captures.append(1), original(*a, **k))[1])
        model = mlp()
        model.sizes, model.names = [1, 2], {"a": 1.0}
        sizes, names = model.sizes, model.names
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        for _ in range(3):
            pipe.step(x, target=y)
        assert len(captures) == 1
        assert model.sizes is sizes
        assert model.names is names
        names["a"] = 2.0
        pipe.step(x, target=y)
        assert len(captures) == 2

    def test_checked_linear_algebra(self):
        x, y = batch()
        model = Between(lambda self, h: h @ torch.linalg.inv(h.T @ h + torch.eye(WIDTH)))
        assert_plain_or_refused(model, x, target=y)

    def test_a_copy_of_a_pipe_has_a_model_of_its_own(self):
        x, y = batch()
        pipe = make_pipe(mlp(), loss_fn=mse)
        pipe.step(x, target=y)
        other = copy.deepcopy(pipe)
        assert next(other.parameters()) is next(other.model.parameters())
        assert next(other.parameters()) is not next(pipe.parameters())
        torch.testing.assert_close(other.step(x, target=y), pipe.step(x, target=y))

    def test_buffers_tied_after_a_step(self):
        def scaled(self: Any, h: Tensor) -> Tensor:
            self.state.add_(1.0)
            return h * self.state + self.other

        x, y = batch()
        model = Between(scaled, buffer=torch.zeros(WIDTH))
        model.register_buffer("other", torch.zeros(WIDTH))
        pipe = make_pipe(model, loss_fn=mse)
        pipe.step(x, target=y)
        model.other = model.state
        model.zero_grad()
        expected = copy.deepcopy(model)
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse))
        assert_same_state(model, expected)
