"""What users do wrong: one clear error of ours each, before anything has run or changed."""

import copy
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twobp_fx
from tests.pipe_helpers import WIDTH, Between, assert_same_state, batch, linear, make_pipe, mlp, mse, plain_step
from twobp_fx.errors import CaptureError, CutError, InputError, PlanError, StageError, TwobpError
from twobp_fx.schedules import Plan, build

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch.export logs what it could not capture; the error says it again."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def refused(function: Callable[[], Any], kind: type[TwobpError], *words: str) -> TwobpError:
    """One error of exactly this kind, that says all of `words` (regular expressions) and is a sentence or more."""
    with pytest.raises(TwobpError) as caught:
        function()
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for word in words:
        assert re.search(word, str(error)), f"{word!r} is not in: {error}"
    assert len(str(error)) > 25
    return error


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a refused call must leave alone."""
    state = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items() if not value.is_meta}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    for values in attributes.values():
        for registry in ("_parameters", "_buffers", "_modules"):
            values[registry] = {key: id(value) for key, value in values[registry].items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"state": state, "attributes": attributes, "gradients": gradients, "random": torch.get_rng_state()}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after["attributes"].keys() == before["attributes"].keys()
    for name, values in before["attributes"].items():
        assert after["attributes"][name] == values, f"attributes of module '{name}'"
    for kind in ("state", "gradients", "random"):
        torch.testing.assert_close(after[kind], before[kind], rtol=0, atol=0)


def refused_unchanged(model: nn.Module, function: Callable[[], Any], kind: type[TwobpError], *words: str) -> None:
    """Refused, nothing changed, and the second attempt says the same."""
    for p in model.parameters():
        p.grad = None if p.is_meta else torch.ones_like(p)
    before = snapshot(model)
    first = refused(function, kind, *words)
    assert_unchanged(model, before)
    assert str(refused(function, kind, *words)) == str(first)


class TestCompile:
    @pytest.mark.parametrize("stages", [0, -1, True, False, "2", 2.0, 2.5, [1], ["2", 3], {"a": 1}, None, object()])
    def test_stages(self, stages):
        refused(lambda: make_pipe(mlp(), stages), InputError, "stages")

    def test_stages_of_a_sequence(self):
        refused(lambda: make_pipe([linear(), linear()], 2), InputError, "leave stages= out")

    @pytest.mark.parametrize(
        "model", [None, [], (), [nn.Linear(1, 1), nn.Linear], nn.Linear, lambda x: x, 5, "model", {"a": nn.Linear(1, 1)}]
    )
    def test_model(self, model):
        refused(lambda: twobp_fx.compile(model), InputError, "[Mm]odule")

    def test_model_and_stages(self):
        """Whatever else is said: not that something which is no sequence is one."""
        for model in (None, nn.Linear, lambda x: x, 5):
            refused(lambda model=model: twobp_fx.compile(model, 2), InputError, "model must be")

    @pytest.mark.parametrize("microbatches", [0, -1, "4", True, 2.0])
    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b-1"])
    def test_microbatches(self, schedule, microbatches):
        refused(lambda: make_pipe(mlp(), 2, schedule=schedule, microbatches=microbatches), PlanError, "microbatches|micro-batches")

    def test_microbatches_that_the_schedule_does_not_run(self):
        refused(lambda: make_pipe(mlp(), 2, schedule="1f1b-1", microbatches=3), PlanError, "not 3", "1f1b")
        plan = build("gpipe", ranks=2, microbatches=4)
        refused(lambda: make_pipe(mlp(), 2, schedule=plan, microbatches=3), PlanError, "4 micro-batches", "microbatches=3")

    def test_unknown_schedules(self):
        refused(lambda: make_pipe(mlp(), 2, schedule="1f1b-3"), PlanError, "did you mean '1f1b-[12]'", "gpipe")
        refused(lambda: make_pipe(mlp(), 2, schedule="gpip"), PlanError, "did you mean 'gpipe'")
        refused(lambda: make_pipe(mlp(), 2, schedule=""), PlanError, "known schedules")

    @pytest.mark.parametrize("schedule", [None, 987654, ["1f1b"], object()])
    def test_no_schedules(self, schedule):
        refused(lambda: make_pipe(mlp(), 2, schedule=schedule), PlanError, "schedule")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("0F0,0X0\n1F0,1B0\n", ("column 2", "'0X0'")),
            ("", ("no action",)),
            ("0F0,0B0\n", ("1 stages", "2")),
            ("0F0,0B0\n1F0\n", ("1F0", "no backward")),
            ("0B0,0F0\n1F0,1B0\n", ("0B0", "before")),
            ("0SEND_F0\n", ("leave out communication",)),
            ("0F0,0F0,0B0\n1F0,1B0\n", ("twice",)),
            ("\0\1", ("plan",)),
        ],
    )
    def test_malformed_files(self, tmp_path, text, words):
        path = tmp_path / "plan.csv"
        path.write_text(text)
        refused(lambda: make_pipe(mlp(), 2, schedule=path), PlanError, *words)

    def test_missing_files_and_folders(self, tmp_path):
        refused(lambda: make_pipe(mlp(), 2, schedule=tmp_path / "none.csv"), PlanError, "none.csv", "No such file")
        refused(lambda: make_pipe(mlp(), 2, schedule=str(tmp_path / "none.csv")), PlanError, "No such file")
        refused(lambda: make_pipe(mlp(), 2, schedule=tmp_path), PlanError, "cannot read")

    def test_a_plan_of_other_stages(self):
        plan = build("gpipe", ranks=3, microbatches=2)
        refused(lambda: make_pipe(mlp(), 2, schedule=plan), PlanError, "3 stages", "cut into 2")
        refused(lambda: make_pipe(mlp(), ["2"], schedule=plan), PlanError, "3 stages", "cut into 2")

    def test_a_plan_that_deadlocks(self):
        plan = Plan.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
        refused(lambda: make_pipe(mlp(), 2, schedule=plan), PlanError, "deadlock", "Reorder")

    @pytest.mark.parametrize("compiler", ["foo", "Inductor", None, 5, ["eager"]])
    def test_compiler(self, compiler):
        refused(lambda: make_pipe(mlp(), 2, compiler=compiler), InputError, "compiler=", "'eager'")

    @pytest.mark.parametrize(
        "devices", [["cpu"], [], ["cpu"] * 3, "cpu", torch.device("cpu"), ["cpu", "banana"], ["cpu", None], 5, ["cpu", ["cpu"]]]
    )
    def test_devices(self, devices):
        refused(lambda: make_pipe(mlp(), 2, devices=devices), InputError, "devices")

    @pytest.mark.parametrize("loss_fn", ["mse", 5, nn.MSELoss])
    def test_loss_fn(self, loss_fn):
        refused(lambda: make_pipe(mlp(), 2, loss_fn=loss_fn), InputError, "loss_fn")

    def test_example_arguments(self):
        x, y = batch()
        refused(lambda: make_pipe(mlp(), 2, loss_fn=mse, example_args=(x,)), InputError, "'target'")
        refused(lambda: make_pipe(mlp(), 2, loss_fn=mse, example_args=x, example_kwargs={"target": y}), InputError, "example_args")
        refused(lambda: make_pipe(mlp(), 2, loss_fn=mse, example_args=5, example_kwargs={"target": y}), InputError, "example_args")
        refused(lambda: make_pipe(mlp(), 2, loss_fn=mse, example_args=(x,), example_kwargs=[y]), InputError, "example_kwargs")

    def test_nothing_captured_yet(self):
        refused(lambda: make_pipe(mlp(), 2).stages, InputError, "example_args=")


class TestCut:
    def test_more_stages_than_layers(self):
        x, y = batch(20)
        model = mlp()
        pipe = make_pipe(model, 10, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x, target=y), CutError, "3 layers", "at most 3 stages")

    @pytest.mark.parametrize(
        ("names", "words"),
        [
            (["4", "2"], ("'2'", "order")),
            (["0"], ("'0'", "runs first")),
            (["nope"], ("'nope'", "named_modules")),
            (["2.weight"], ("'2.weight'", "no stage can begin there")),
            (["2", "2"], ("'2'", "order")),
        ],
    )
    def test_names(self, names, words):
        x, y = batch(6)
        model = mlp()
        pipe = make_pipe(model, names, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x, target=y), CutError, *words)

    def test_a_near_miss_is_suggested(self):
        model = Between(lambda self, h: h)
        x, y = batch()
        refused(lambda: make_pipe(model, ["lost"], loss_fn=mse).step(x, target=y), CutError, "Did you mean 'last'")


def branching(self: Any, h: Tensor) -> Tensor:
    return h * 2 if h.sum() > 0 else h


def through_numpy(self: Any, h: Tensor) -> Tensor:
    return h + torch.from_numpy(h.detach().numpy())


def generator(self: Any, h: Tensor) -> Tensor:
    return h + torch.randn(h.shape, generator=torch.Generator().manual_seed(0))


class TestCapture:
    def test_control_flow_that_depends_on_data(self):
        model = Between(branching)
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x, target=y), CaptureError, "Between", "control flow")

    @pytest.mark.parametrize("function", [through_numpy, generator])
    def test_what_cannot_be_traced(self, function):
        model = Between(function)
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        try:
            pipe.step(x, target=y)
        except StageError:
            raise
        except TwobpError:
            return
        expected = copy.deepcopy(model)
        model.zero_grad()
        pipe.step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(model, expected)

    def test_a_forward_that_raises(self):
        def function(self: Any, h: Tensor) -> Tensor:
            raise KeyError("the user's own")

        model = Between(function)
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x, target=y), CaptureError, "KeyError", "the user's own")

    def test_a_loss_module_that_counts_its_calls(self):
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, output: Tensor, target: Tensor) -> Tensor:
                self.calls += 1
                return mse(output, target) * self.calls

        x, y = batch()
        refused(
            lambda: make_pipe(mlp(), loss_fn=Counting()).step(x, target=y), CaptureError, "assigns to attribute 'calls'", "Counting"
        )

    def test_a_forward_that_raises_after_it_set_an_attribute(self):
        def function(self: Any, h: Tensor) -> Tensor:
            self.kept = h
            raise KeyError("the user's own")

        model = Between(function)
        x, y = batch()
        refused(lambda: make_pipe(model, loss_fn=mse).step(x, target=y), CaptureError, "the user's own")
        model.function = lambda self, h: h.tanh()
        expected = copy.deepcopy(Between(model.function))
        expected.load_state_dict(model.state_dict())
        make_pipe(model, loss_fn=mse).step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(model, expected)

    def test_no_forward(self):
        x, y = batch()
        model = nn.ModuleList([linear(), linear()])
        refused(lambda: make_pipe(model, loss_fn=mse).step(x, target=y), CaptureError, "ModuleList", "forward")

    @pytest.mark.parametrize(
        "write",
        [lambda x: x.add_(1), lambda x: x[:, 0].zero_(), lambda x: x.view(-1).mul_(2), lambda x: F.relu(x.t(), inplace=True)],
        ids=["whole", "column", "view", "transposed"],
    )
    @pytest.mark.parametrize("under_no_grad", [True, False])
    def test_a_write_into_an_argument(self, write, under_no_grad):
        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = linear(), linear()

            def forward(self, x: Tensor) -> Tensor:
                with torch.set_grad_enabled(not under_no_grad):
                    write(x)
                return self.last(self.first(x))

        model = Writes()
        x, y = batch()
        before = x.clone()
        pipe = make_pipe(model, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, "argument of the model", "test_errors.py")
        refused_unchanged(model, lambda: pipe(x), InputError, "argument of the model")
        assert torch.equal(x, before)

    @pytest.mark.parametrize("view", [True, False])
    def test_a_write_into_a_parameter(self, view):
        def function(self: Any, h: Tensor) -> Tensor:
            with torch.no_grad():
                (self.extra[0].weight[0] if view else self.extra[0].weight).mul_(0.5)
            return self.extra[0](h)

        model = Between(function, linear())
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, "extra.0.weight", "writes in place")

    def test_a_lazy_module(self):
        model = nn.Sequential(nn.LazyLinear(WIDTH), linear())
        x, y = batch()
        pipe = make_pipe(model, loss_fn=mse)
        refused(lambda: pipe.step(x, target=y), InputError, "lazy", "0.weight")
        model(x)
        expected = copy.deepcopy(model)
        pipe.step(x, target=y)
        plain_step(expected, x, target=y, loss_fn=mse)
        assert_same_state(model, expected)

    def test_an_unknown_class_as_output(self):
        class Result:
            pass

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, x: Tensor) -> Any:
                self.net(x)
                return Result()

        refused(lambda: make_pipe(Model())(batch()[0]), CaptureError, "Result", "register_pytree_node")

    @pytest.mark.filterwarnings("ignore:Full backward hook")
    def test_backward_hooks(self):
        model = mlp()
        model[2].register_full_backward_hook(lambda module, gi, go: None)
        x, y = batch()
        refused(lambda: make_pipe(model, loss_fn=mse).step(x, target=y), CaptureError, "'2'", "backward hook")
        model = Between(lambda self, h: (h.register_hook(lambda g: g * 2), h)[1])
        refused(lambda: make_pipe(model, loss_fn=mse).step(x, target=y), CaptureError, "register_hook", "test_errors.py")


class TestLoss:
    @pytest.mark.parametrize(
        ("loss_fn", "words"),
        [
            (lambda o, t: o, ("no scalar", r"\[2, 6\]", "mean")),
            (lambda o, t: o.mean()[None], ("no scalar", r"\[1\]")),
            (lambda o, t: o.argmax(), ("int64",)),
            (lambda o, t: (o * 1j).sum(), ("complex",)),
            (lambda o, t: None, ("no loss", "None")),
            (lambda o, t: (o.mean(), o), ("no loss", "tuple")),
            (lambda o, t: 1.5, ("no loss", "float")),
        ],
    )
    def test_no_scalar(self, loss_fn, words):
        model = mlp()
        x, y = batch()
        pipe = make_pipe(model, loss_fn=loss_fn)
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, "loss_fn", *words)

    def test_a_number_taken_out_of_the_graph(self):
        model = mlp()
        x, y = batch()
        pipe = make_pipe(model, loss_fn=lambda o, t: float(o.mean()))
        with pytest.raises((InputError, CaptureError)):
            pipe.step(x, target=y)

    def test_of_wrong_arguments(self):
        x, y = batch()
        refused(lambda: make_pipe(mlp(), loss_fn=lambda o: o.mean()).step(x, target=y), CaptureError, "positional argument")

    def test_the_model_returns_none(self):
        x, _ = batch()
        refused(lambda: make_pipe(mlp()).step(x), InputError, "no scalar loss", "loss_fn=")

    @pytest.mark.parametrize("split", [True, False])
    def test_that_depends_on_no_parameter(self, split):
        x, y = batch()
        model = mlp().requires_grad_(False)
        pipe = make_pipe(model, loss_fn=mse, split_backward=split)
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, "requires a gradient")
        model.requires_grad_(True)
        pipe = make_pipe(model, loss_fn=lambda o, t: (o.detach() - t).square().mean())
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, "requires a gradient")

    def test_target_without_loss_fn(self):
        x, y = batch()
        model = mlp()
        pipe = make_pipe(model)
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, "target=", "loss_fn")

    def test_target_forgotten(self):
        x, _ = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=F.mse_loss)
        with pytest.raises(TwobpError, match=r"target|NoneType"):
            pipe.step(x)


class TestStep:
    @pytest.mark.parametrize(
        ("size", "count", "words"),
        [
            (5, 2, ("batch of 5", "evenly into 2", "multiple of 2")),
            (3, 4, ("batch of 3", "too small for 4")),
            (1, 2, ("batch of 1", "too small")),
            (0, 2, ("batch of 0", "too small")),
        ],
    )
    def test_batches_that_do_not_split(self, size, count, words):
        x, y = batch(size)
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        pipe = make_pipe(model, loss_fn=mse, schedule="gpipe", microbatches=count)
        refused_unchanged(model, lambda: pipe.step(x, target=y), InputError, *words)

    def test_batch_sizes_that_disagree(self):
        x, _ = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        longer = torch.randn(6, WIDTH)
        refused_unchanged(model, lambda: pipe.step(x, target=longer), InputError, "disagree", "4", "6")

    def test_under_no_grad(self):
        x, y = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                refused(lambda: pipe.step(x, target=y), InputError, "no_grad", r"pipe\(")

    def test_wrong_arguments(self):
        x, y = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        for call in (lambda: pipe.step(target=y), lambda: pipe.step(x, x, target=y), lambda: pipe.step(x, other=x, target=y)):
            refused_unchanged(model, call, InputError, "does not take these arguments", "goes in target=")
        refused_unchanged(model, lambda: pipe(), InputError, "does not take these arguments")
        for call in (
            lambda: pipe.step(torch.ones(4, WIDTH + 1), target=y),
            lambda: pipe.step(x.tolist(), target=y),
            lambda: pipe.step(None, target=y),
            lambda: pipe(torch.ones(4, WIDTH + 1)),
        ):
            refused_unchanged(model, call, CaptureError, "argument|tensor|Tensor|reduction dim|NoneType")
        expected = copy.deepcopy(model)
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse))

    def test_a_dtype_that_does_not_fit(self):
        x, y = batch()
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        with pytest.raises(TwobpError, match="dtype"):
            pipe.step(x.double(), target=y)
        assert all(p.grad is None for p in model.parameters())

    def test_on_the_meta_device(self):
        x, y = batch()
        pipe = make_pipe(mlp().to("meta"), loss_fn=mse)
        refused(lambda: pipe.step(x, target=y), InputError, "meta", "to_empty")
        refused(lambda: pipe(x), InputError, "meta", "to_empty")
        model = mlp()
        pipe = make_pipe(model, loss_fn=mse)
        refused_unchanged(model, lambda: pipe.step(x.to("meta"), target=y), InputError, "meta")
        refused_unchanged(model, lambda: pipe.step(x, target=y.to("meta")), InputError, "meta")
        refused_unchanged(model, lambda: pipe(x.to("meta")), InputError, "meta")
        model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
        model[1].running_mean = model[1].running_mean.to("meta")
        refused(lambda: make_pipe(model, loss_fn=mse).step(x, target=y), InputError, "meta", "running_mean")

    def test_a_pipe_inside_a_pipe(self):
        x, y = batch()
        inner = make_pipe(mlp())
        with pytest.raises(TwobpError):
            make_pipe(nn.Sequential(linear(), inner), loss_fn=mse).step(x, target=y)


def test_a_good_step_after_every_kind_of_bad_one():
    x, y = batch()
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
    expected = copy.deepcopy(model)
    pipe = make_pipe(model, loss_fn=mse)
    for bad in (
        lambda: pipe.step(x[:3], target=y[:3]),
        lambda: pipe.step(x, target=y[:2]),
        lambda: pipe.step(torch.randn(4, 3), target=y),
        lambda: pipe.step(),
    ):
        with pytest.raises(TwobpError):
            bad()
        torch.testing.assert_close(pipe.step(x, target=y), plain_step(expected, x, target=y, loss_fn=mse))
        assert_same_state(model, expected, rtol=1e-4, atol=1e-5)
