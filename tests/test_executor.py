"""The in-process executor: failures in the middle of a step, interrupts, odd plans, threads, memory."""

import contextlib
import copy
import gc
import itertools
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import twobp_fx
from tests.helpers import equal
from tests.pipe_helpers import WIDTH, assert_same_state, batch, linear, make_pipe, mlp, mse, plain_step
from twobp_fx.errors import PlanError, StageError
from twobp_fx.schedules import Action, Plan, build

torch.set_num_threads(1)

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    yield
    assert not workers()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("twobp rank")]


def within_patience(function: Callable[[], Any]) -> Any:
    """What `function` returns or raises, run in a thread of its own: a hang fails the test instead of stopping the run."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as error:  # handed to the caller below
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the step hangs"
    good, value = outcome.pop()
    if not good:
        raise value
    return value


class Failing:
    """A compiler whose callables count their calls, and raise at the one numbered `at`."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.error: BaseException = ValueError("told to fail")
        self._lock = threading.Lock()

    def __call__(self, module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            with self._lock:
                self.calls += 1
                fail = self.calls - 1 == self.at
            if fail:
                raise type(self.error)(*self.error.args)  # a fresh one: it holds its traceback, and that the activations
            return module(*args)

        return run


def plan_actions(plan: Plan) -> int:
    return sum(map(len, plan.ranks))


class TestFailures:
    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "1f1b-2"])
    def test_at_every_action_in_turn(self, schedule, split):
        count = {"1f1b-2": 4}.get(schedule, 2)
        x, y = batch(4)
        x.requires_grad_()  # so that the first stage's I has something to compute
        compiler = Failing()
        model = mlp()
        pipe = make_pipe(model, 2, loss_fn=mse, schedule=schedule, microbatches=count, compiler=compiler, split_backward=split)
        pipe.step(x, target=y)
        good = {name: p.grad.clone() for name, p in model.named_parameters()}
        total, compiler.calls = compiler.calls, 0
        assert total == plan_actions(pipe.plan)
        actions = {str(action) for row in pipe.plan.ranks for action in row}
        for at in range(total):
            model.zero_grad()
            x.grad = None
            kept = torch.randn(WIDTH, WIDTH)
            model[2].weight.grad = kept.clone()
            grad = model[2].weight.grad
            compiler.calls, compiler.at = 0, at
            with pytest.raises(StageError, match="told to fail") as caught:
                within_patience(lambda: pipe.step(x, target=y))
            assert not workers()
            assert caught.value.action in actions
            assert caught.value.stage == int(caught.value.action[0])
            assert f"action {caught.value.action} of plan" in str(caught.value)
            assert "module" in str(caught.value)
            assert isinstance(caught.value.__cause__, ValueError)
            assert model[2].weight.grad is grad
            assert torch.equal(grad, kept)
            assert x.grad is None
            assert all(p.grad is None for name, p in model.named_parameters() if name != "2.weight")
        compiler.at = None
        model.zero_grad()
        within_patience(lambda: pipe.step(x, target=y))
        assert all(equal(p.grad, good[name]) for name, p in model.named_parameters())

    @pytest.mark.parametrize("bad", [0, 1, 2, 3])
    def test_bad_data_in_one_microbatch(self, bad):
        model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Tanh(), linear(), nn.Tanh(), linear())
        expected = copy.deepcopy(model)
        pipe = make_pipe(model, 2, loss_fn=mse, schedule="1f1b", microbatches=4)
        ids, y = torch.randint(5, (4,)), torch.randn(4, WIDTH)
        pipe.step(ids, target=y)
        plain_step(expected, ids, target=y, count=4, loss_fn=mse)
        wrong = ids.clone()
        wrong[bad] = 7
        with pytest.raises(StageError, match="index out of range") as caught:
            within_patience(lambda: pipe.step(wrong, target=y))
        assert caught.value.action == f"0F{bad}"
        assert "module" in str(caught.value)
        assert "'0'" in str(caught.value)
        assert_same_state(model, expected)
        pipe.step(ids, target=y)
        plain_step(expected, ids, target=y, count=4, loss_fn=mse)
        assert_same_state(model, expected)

    def test_a_system_exit_in_a_stage_does_not_end_silently(self):
        compiler = Failing()
        pipe = make_pipe(mlp(), 2, loss_fn=mse, compiler=compiler)
        compiler.at, compiler.error = 2, SystemExit(3)
        x, y = batch()
        with pytest.raises((StageError, SystemExit)):
            within_patience(lambda: pipe.step(x, target=y))

    def test_a_callable_that_returns_too_few_values(self):
        def compiler(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            return lambda *args: module(*args)[:-1]

        x, y = batch()
        with pytest.raises(StageError, match="returned"):
            within_patience(lambda: make_pipe(mlp(), 2, loss_fn=mse, compiler=compiler).step(x, target=y))

    def test_nothing_is_held_after_a_failure(self):
        compiler = Failing()
        pipe = make_pipe(mlp(), 2, loss_fn=mse, compiler=compiler, schedule="gpipe", microbatches=4)
        x, y = batch(8)
        pipe.step(x, target=y)
        before = count_tensors()
        gc.disable()
        try:
            for at in range(4, 16, 3):
                compiler.calls, compiler.at = 0, at
                with contextlib.suppress(StageError):
                    pipe.step(x, target=y)
            assert count_tensors() <= before, "activations live on until the garbage collector runs"
        finally:
            gc.enable()

    def test_threads_are_left_as_they_were(self):
        compiler = Failing()
        pipe = make_pipe(mlp(), 2, loss_fn=mse, compiler=compiler)
        x, y = batch()
        torch.set_num_threads(3)
        try:
            for at in (None, 1):
                compiler.at = at
                try:
                    pipe.step(x, target=y)
                except StageError:
                    assert at == 1
                assert torch.get_num_threads() == 3
                assert within_patience(torch.get_num_threads) == 3
        finally:
            torch.set_num_threads(1)


class TestInterrupt:
    def test_ends_the_step_and_the_next_is_right(self):
        slow = [0.0]

        def compiler(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            def run(*args: Tensor) -> Any:
                time.sleep(slow[0])
                return module(*args)

            return run

        x, y = batch(8)
        model = mlp()
        expected = copy.deepcopy(model)
        pipe = make_pipe(model, 2, loss_fn=mse, compiler=compiler, schedule="1f1b", microbatches=4)
        pipe.step(x, target=y)
        plain_step(expected, x, target=y, count=4, loss_fn=mse)
        slow[0] = 0.2
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                pipe.step(x, target=y)
            assert time.monotonic() - started < 2.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert not workers()
        assert_same_state(model, expected)
        slow[0] = 0.0
        within_patience(lambda: pipe.step(x, target=y))
        plain_step(expected, x, target=y, count=4, loss_fn=mse)
        assert_same_state(model, expected)

    def test_threads_are_left_as_they_were(self):
        def compiler(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            return lambda *args: (time.sleep(0.2), module(*args))[1]

        x, y = batch()
        pipe = make_pipe(mlp(), 2, loss_fn=mse, compiler=compiler)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        torch.set_num_threads(3)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pipe.step(x, target=y)
            assert torch.get_num_threads() == 3
            assert within_patience(torch.get_num_threads) == 3
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
            torch.set_num_threads(1)


def four_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(4)))


CUTS = ["1", "2", "3"]


def rows(*texts: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(text) for text in row.split()) for row in texts)


PLANS = {
    "one rank": Plan(
        "one rank",
        rows("0F0 1F0 2F0 3F0 3I0 2I0 1I0 0I0 0W0 1W0 2W0 3W0 0F1 1F1 2F1 3F1 3B1 2B1 1B1 0B1"),
    ),
    "looped": Plan(
        "looped",
        rows(
            "0F0 0F1 2F0 2F1 2I0 2I1 0I0 0I1 0W0 0W1 2W0 2W1",
            "1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 1W0 1W1 3W0 3W1",
        ),
    ),
    "v-shaped, micro-batches backwards": Plan(
        "v",
        rows(
            "0F1 0F0 3F1 3I1 3F0 3I0 0I1 0W1 0I0 0W0 3W0 3W1",
            "1F1 2F1 1F0 2F0 2I1 1I1 2I0 1I0 1W0 2W0 1W1 2W1",
        ),
    ),
    "split and unsplit mixed": Plan(
        "mixed",
        rows("0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1B0 1B1", "2F0 2I0 2F1 2I1 2W1 2W0", "3F0 3B0 3F1 3I1 3W1"),
    ),
}


class TestPlans:
    @pytest.mark.parametrize("name", PLANS)
    def test_any_valid_plan(self, name):
        plan = PLANS[name]
        model = four_layers()
        expected = copy.deepcopy(model)
        x, y = batch()
        pipe = make_pipe(model, CUTS, loss_fn=mse, schedule=plan)
        for _ in range(2):
            loss = within_patience(lambda: pipe.step(x, target=y))
            torch.testing.assert_close(loss, plain_step(expected, x, target=y, loss_fn=mse))
        assert_same_state(model, expected)

    def test_out_of_a_file(self, tmp_path):
        path = tmp_path / "looped.csv"
        path.write_text(PLANS["looped"].to_csv())
        x, y = batch()
        for schedule in (path, str(path)):
            model = four_layers()
            expected = copy.deepcopy(model)
            within_patience(
                lambda model=model, schedule=schedule: make_pipe(model, CUTS, loss_fn=mse, schedule=schedule).step(x, target=y)
            )
            plain_step(expected, x, target=y, loss_fn=mse)
            assert_same_state(model, expected)

    @pytest.mark.parametrize(
        "text",
        ["0F0 0B0", "0F0 0I0 0W0 1F0 1B0", "1F0 1B0", "0F0 1F0 1B0", "0F0 0F0 0B0 1F0 1B0", "0B0 0F0 1F0 1B0"],
    )
    def test_a_plan_that_cannot_run_is_refused_at_once(self, text):
        with pytest.raises(PlanError):
            make_pipe(mlp(), 2, loss_fn=mse, schedule=Plan("bad", rows(text)))

    def test_stage_callables_of_a_plan_are_compiled_only_if_it_asks(self):
        compiled: list[str] = []

        def compiler(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            compiled.append("graph")
            return module

        x, y = batch()
        pipe = make_pipe(mlp(), 2, loss_fn=mse, compiler=compiler)
        pipe.step(x, target=y)
        assert not any(program.is_prepared("backward") for program in pipe.stages)
        count = len(compiled)
        pipe.step(x, target=y)
        assert len(compiled) == count

    def test_as_many_stages_as_layers_and_many_microbatches(self):
        model = nn.Sequential(*(linear() for _ in range(8)))
        expected = copy.deepcopy(model)
        x, y = batch(32)
        plan = build("1f1b", ranks=8, microbatches=32)
        within_patience(lambda: make_pipe(model, 8, loss_fn=mse, schedule=plan).step(x, target=y))
        plain_step(expected, x, target=y, count=32, loss_fn=mse)
        assert_same_state(model, expected, rtol=1e-4, atol=1e-5)


class TestThreads:
    def work(self, results: list[Any], index: int, barrier: threading.Barrier) -> None:
        try:
            generator = torch.Generator().manual_seed(index)
            model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(), linear())
            expected = copy.deepcopy(model)
            x = torch.randn(4, WIDTH, generator=generator)
            y = torch.randn(4, WIDTH, generator=generator)
            barrier.wait()
            pipe = make_pipe(model, 2, loss_fn=mse)
            pipe.step(x, target=y)
            mse(pipe(x), y).backward()
            plain_step(expected, x, target=y, loss_fn=mse)
            mse(expected(x), y).backward()
            assert_same_state(model, expected, rtol=1e-4, atol=1e-5)
            results.append(None)
        except BaseException as error:  # judged by the main thread
            results.append(error)

    def test_ten_pipes_at_once(self):
        results: list[Any] = []
        barrier = threading.Barrier(10)
        threads = [threading.Thread(target=self.work, args=(results, i, barrier), daemon=True) for i in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert results == [None] * 10

    def test_a_capture_does_not_disturb_other_threads(self):
        """Nor leaves anything patched behind."""

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient * 2

        apply = torch.autograd.Function.__dict__["apply"]
        stop = threading.Event()
        errors: list[BaseException] = []

        def other() -> None:
            while not stop.is_set():
                try:
                    Double.apply(torch.ones(2, requires_grad=True)).sum().backward()
                except BaseException as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        try:
            x, y = batch()
            for _ in range(3):
                make_pipe(mlp(), 2, loss_fn=mse).step(x, target=y)
        finally:
            stop.set()
            thread.join(PATIENCE)
        assert not errors
        assert torch.autograd.Function.__dict__["apply"] is apply

    def test_seeds_of_pipes_in_threads_are_not_drawn_from_each_other(self):
        """While one pipe draws under its own seed, another must not take a seed from that state."""
        entered, leave = threading.Event(), threading.Event()

        def compiler(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            def run(*args: Tensor) -> Any:
                if any("bernoulli" in str(n.target) or "dropout" in str(n.target) for n in module.graph.nodes):
                    entered.set()
                    leave.wait(0.2)
                return module(*args)

            return run

        def model() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(linear(), nn.Dropout(0.5), linear())

        x = torch.ones(2, WIDTH)
        one, other = make_pipe(model(), 1, loss_fn=mse, compiler=compiler), make_pipe(model(), 1, loss_fn=mse)
        other.step(x, target=x)
        torch.manual_seed(9)
        one.step(x, target=x)
        alone = one.step(x, target=x)
        entered.clear()
        torch.manual_seed(9)
        one.step(x, target=x)
        losses: list[Tensor] = []
        entered.clear()
        thread = threading.Thread(target=lambda: losses.append(one.step(x, target=x)), daemon=True)
        thread.start()
        assert entered.wait(PATIENCE)
        other.step(x, target=x)
        leave.set()
        thread.join(PATIENCE)
        assert equal(losses[0], alone)


def count_tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(isinstance(o, Tensor) for o in gc.get_objects())


def test_forwards_of_two_ranks_run_at_the_same_time():
    """Those of stages that draw random numbers take turns. Attention without dropout looks random to torch, and draws none."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = linear()

        def forward(self, h: Tensor) -> Tensor:
            heads = self.project(h)[:, None, None]
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0, 0]

    started = itertools.count()
    meeting = threading.Barrier(2, timeout=PATIENCE / 2)

    def compiler(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        names = [str(node.target) for node in module.graph.nodes]
        forward = any("attention" in name and "backward" not in name for name in names)

        def run(*args: Tensor) -> Any:
            if forward and next(started) in (1, 2):  # 0F1 and 1F0, which both follow 0F0
                meeting.wait()
            return module(*args)

        return run

    pipe = make_pipe(nn.Sequential(Attention(), Attention()), loss_fn=mse, schedule="gpipe", microbatches=2, compiler=compiler)
    x, y = batch()
    within_patience(lambda: pipe.step(x, target=y))
    assert next(started) == 4


@pytest.mark.parametrize("split", [True, False])
def test_memory_is_level_over_many_steps(split):
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1), linear())
    pipe = make_pipe(model, 2, loss_fn=mse, schedule="1f1b", microbatches=4, split_backward=split)
    x, y = batch(8)
    for _ in range(2):
        pipe.step(x, target=y)
    gc.collect()
    before = count_tensors()
    gc.disable()
    try:
        for _ in range(30):
            pipe.step(x, target=y)
        assert count_tensors() <= before, "something lives on until the garbage collector runs"
    finally:
        gc.enable()


def test_inductor_fails_and_recovers_as_eager_does():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8))
    pipe = twobp_fx.compile(model, 2, loss_fn=lambda o, t: (o - t).square().mean(), compiler="inductor")
    expected = copy.deepcopy(model)
    ids, y = torch.tensor([0, 1, 2, 3]), torch.randn(4, 8)
    loss = pipe.step(ids, target=y)
    torch.testing.assert_close(loss, plain_step(expected, ids, target=y, loss_fn=mse))
    assert_same_state(model, expected)
    bad = ids.clone()
    bad[3] = 99
    with pytest.raises(StageError):
        within_patience(lambda: pipe.step(bad, target=y))
    assert_same_state(model, expected)
    pipe.step(ids, target=y)
    plain_step(expected, ids, target=y, loss_fn=mse)
    assert_same_state(model, expected)
