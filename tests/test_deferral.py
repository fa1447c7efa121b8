"""`twobp_fx.defer_weight_grads()`: I at once, W when it is asked for."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import twobp_fx
from tests.backend_helpers import assert_as_eager, backward_of_sum, compiled, deferred, fresh_dynamo, state_after
from tests.helpers import equal, leaf
from twobp_fx.errors import InputError

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh():
    with fresh_dynamo():
        yield
    gc.collect()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Lambda(nn.Module):
    """Two linear layers and a parameter; the forward is `function(self, *args)`."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


def put_off(model, *args, compiler="eager"):
    """One step of the compiled model: what is pending."""
    with twobp_fx.defer_weight_grads() as pending:
        backward_of_sum(compiled(model, compiler), *args)
    return pending


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def expected_grads(model, *args):
    """The parameters' gradients of the same step, eagerly."""
    state = state_after(backward_of_sum, model, args)
    return {name: state[f"gradient of {name}"] for name, _ in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert equal(found[name], expected[name]), name


class TestHalves:
    def test_i_leaves_parameters_alone_and_gives_the_inputs_gradients(self):
        model, x = mlp(), leaf(3, 4)
        expected = state_after(backward_of_sum, model, [x])
        pending = put_off(model, x)
        assert equal(x.grad, expected["gradient of input 0"])
        assert all(p.grad is None for p in model.parameters())
        pending.run()
        assert_same(grads(model), expected_grads(model, x))

    def test_i_leaves_a_gradient_that_is_there_as_it_is(self):
        model, x = mlp(), leaf(3, 4)
        given = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = given[name].clone()
        pending = put_off(model, x)
        assert_same(grads(model), given)
        pending.run()
        expected = expected_grads(model, x)
        assert_same(grads(model), {name: given[name] + expected[name] for name in given})

    def test_token_ids_put_off_an_embedding_too(self):
        model, ids = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4)), torch.randint(11, (2, 5))
        pending = put_off(model, ids)
        assert len(pending) == 1
        assert all(p.grad is None for p in model.parameters())
        pending.run()
        assert_same(grads(model), expected_grads(model, ids))

    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
    def test_micro_batches_in_any_order(self, order):
        def step(call, *args):
            losses = [call(x).pow(2).sum() for x in args]
            for i in order:
                losses[i].backward()

        assert_as_eager(mlp(), *(leaf(3, 4) for _ in range(4)), step=step)

    def test_the_ws_of_micro_batches_in_another_order_than_their_is(self):
        model, xs = mlp().double(), [leaf(3, 4).double().detach() for _ in range(3)]
        for x in xs:
            backward_of_sum(model, x)
        expected = grads(model)
        model.zero_grad()
        call = compiled(model)
        with twobp_fx.defer_weight_grads() as pending:
            for x in xs:
                backward_of_sum(call, x)
        for each in reversed(list(pending)):
            each.run()
        torch.testing.assert_close(grads(model), expected)
        assert len(pending) == 0

    def test_retain_graph_puts_off_each_backward(self):
        model, x = mlp(), leaf(3, 4)
        loss = compiled(model)(x).pow(2).sum()
        with twobp_fx.defer_weight_grads() as pending:
            loss.backward(retain_graph=True)
            loss.backward()
        assert len(pending) == 2
        pending.run()
        assert_same(grads(model), {name: g * 2 for name, g in expected_grads(model, x).items()})

    def test_given_gradients_of_the_outputs(self):
        def step(call, x):
            torch.autograd.backward([call(x), x * 2], [torch.full((3, 4), 0.5), torch.ones(3, 4)])

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_a_scaled_loss(self):
        def step(call, x):
            (call(x).pow(2).sum() * 1024.0).backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_a_grad_scaler(self):
        def trained(compile_it):
            torch.manual_seed(1)
            model = mlp()
            optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
            call = compiled(model) if compile_it else model
            for _ in range(3):
                optimizer.zero_grad()
                with twobp_fx.defer_weight_grads() as pending:
                    scaler.scale(call(leaf(3, 4)).pow(2).mean()).backward()
                pending.run()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            return dict(model.named_parameters())

        assert_same(trained(True), trained(False))

    def test_an_optimizer_trains_as_eagerly(self):
        def trained(compile_it):
            torch.manual_seed(1)
            model = mlp()
            optimizer = torch.optim.AdamW(model.parameters())
            call = compiled(model) if compile_it else model
            for _ in range(3):
                optimizer.zero_grad()
                deferred(lambda: [backward_of_sum(call, leaf(3, 4)) for _ in range(2)])()
                optimizer.step()
            return dict(model.named_parameters())

        assert_same(trained(True), trained(False))

    def test_w_under_inference_mode_and_no_grad_and_autocast(self):
        for surroundings in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
            model, x = mlp(), leaf(3, 4)
            expected = expected_grads(model, x)
            pending = put_off(model, x)
            with surroundings:
                pending.run()
            assert_same(grads(model), expected)
            assert not any(g.is_inference() for g in grads(model).values())

    def test_a_loss_that_only_partly_comes_from_the_compiled_module(self):
        model, other = mlp(), nn.Linear(4, 4)
        x = leaf(3, 4)
        (model(x) * other(x)).sum().backward()
        expected = grads(model), grads(other), x.grad
        model.zero_grad()
        other.zero_grad()
        x.grad = None
        with twobp_fx.defer_weight_grads() as pending:
            (compiled(model)(x) * other(x)).sum().backward()
        assert_same(grads(other), expected[1])
        assert equal(x.grad, expected[2])
        pending.run()
        assert_same(grads(model), expected[0])

    def test_a_gradient_that_is_none_eagerly_stays_none(self):
        pending = put_off(model := Lambda(lambda m, x: m.a(x)), leaf(3, 4))
        pending.run()
        assert model.b.weight.grad is None
        assert model.a.weight.grad is not None

    def test_an_input_gradient_that_shares_storage_with_what_w_holds(self):
        def step(call, x):
            for _ in range(2):
                backward_of_sum(call, x)

        assert_as_eager(Lambda(lambda m, x: x.view(4, 3).t() + m.scale), leaf(12), step=step)


class TestPending:
    """The object that holds what is put off."""

    def pending_three(self):
        model = mlp()
        call = compiled(model)
        with twobp_fx.defer_weight_grads() as pending:
            for n in (1, 2, 3):
                backward_of_sum(call, torch.full((2, 4), float(n)))
        return model, pending

    def test_one_a_call_in_the_order_of_their_is(self):
        first, second, third = mlp(), mlp(), mlp()
        x = leaf(3, 4)
        with twobp_fx.defer_weight_grads() as pending:
            compiled(third)(compiled(second)(compiled(first)(x))).sum().backward()
        owners = [{id(p) for p in each.parameters.values()} for each in pending]
        assert owners == [{id(p) for p in model.parameters()} for model in (third, second, first)]
        pending.drop()

    def test_run_some(self):
        model, pending = self.pending_three()
        assert pending.run(2) == 2
        assert len(pending) == 1
        assert pending.run(5) == 1
        assert pending.run() == 0
        call = mlp()
        call.load_state_dict(model.state_dict())
        for n in (1, 2, 3):
            backward_of_sum(call, torch.full((2, 4), float(n)))
        assert_same(grads(model), grads(call))

    def test_run_none(self):
        model, pending = self.pending_three()
        assert pending.run(0) == 0
        assert model[0].weight.grad is None
        with pytest.raises(InputError, match="how many"):
            pending.run(-1)
        pending.drop()

    def test_each_runs_once(self):
        _, pending = self.pending_three()
        second = list(pending)[1]
        second.run()
        assert not second.waiting
        assert second not in list(pending)
        with pytest.raises(InputError, match="not pending"):
            second.run()
        pending.run()

    def test_drop(self):
        model, pending = self.pending_three()
        assert pending.drop() == 3
        assert (len(pending), pending.nbytes, pending.run()) == (0, 0, 0)
        assert all(p.grad is None for p in model.parameters())

    def test_bytes_held_are_those_of_the_storages_besides_parameters(self):
        model, x = nn.Linear(4, 6), leaf(3, 4)
        with twobp_fx.defer_weight_grads() as pending:
            compiled(model)(x).backward(torch.randn(3, 6))
        assert pending.nbytes == (3 * 4 + 3 * 6) * 4  # the input and the output's gradient
        pending.run()
        assert pending.nbytes == 0

    def test_the_table_names_calls_and_parameters(self):
        pending = put_off(mlp(), leaf(3, 4))
        (each,) = pending
        assert list(each.parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert each.label in str(pending)
        assert str(pending.nbytes) in str(pending)
        pending.run()

    def test_a_call_whose_parameters_get_nothing_is_not_pending(self):
        model = mlp().requires_grad_(False)
        assert len(put_off(model, leaf(3, 4))) == 0
        with twobp_fx.defer_weight_grads() as pending:
            compiled(Lambda(lambda m, x: (x.sin(), m.a(x))))(leaf(3, 4))[0].sum().backward()
        assert len(pending) == 0
        assert str(pending).count("\n") == 1  # the table's head

    def test_never_running_it_warns(self):
        kept = [put_off(mlp(), leaf(3, 4))]
        with pytest.warns(RuntimeWarning, match="1 weight gradients were put off and never run"):
            kept.clear()

    def test_a_compiler_that_fails_in_w_leaves_it_pending(self):
        failing = [False]

        def compiler(graph, examples):
            def run(*args):
                if failing[0]:
                    raise ValueError("out of order")
                return graph(*args)

            return run

        model, x = mlp(), leaf(3, 4)
        pending = put_off(model, x, compiler=compiler)
        failing[0] = True
        with pytest.raises(ValueError, match="out of order"):
            pending.run()
        assert len(pending) == 1
        assert model[0].weight.grad is None
        failing[0] = False
        pending.run()
        assert_same(grads(model), expected_grads(model, x))


ODD = {
    "strides": lambda: torch.ones(4, 8).t(),
    "a part of a larger one": lambda: torch.ones(2, 8, 4)[1],
    "a computed one": lambda: torch.ones(8, 4, requires_grad=True) * 1,
    "a sparse one": lambda: torch.ones(8, 4).to_sparse(),
}
"""What may be found as the `.grad` of a parameter `(8, 4)`."""


class TestAccumulation:
    """How W's gradients get into `.grad`."""

    def twice(self, model, x, compiler="eager"):
        """A step whose gradients stay, and then one whose W is left: the pending W, and what `.grad` held."""
        put_off(model, x, compiler=compiler).run()
        pending = put_off(model, x, compiler=compiler)
        return pending, {name: p.grad.clone() for name, p in model.named_parameters()}

    def test_the_first_gradient_is_kept_without_a_copy(self):
        class Copies(TorchDispatchMode):
            def __init__(self):
                super().__init__()
                self.shapes = []

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.clone.default:
                    self.shapes.append(args[0].shape)
                return func(*args, **(kwargs or {}))

        pending = put_off(mlp(), leaf(3, 4))
        with Copies() as copies:
            pending.run()
        assert copies.shapes == []

    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    def test_a_gradient_that_is_there_is_added_to_in_place(self, compiler):
        model, x = mlp(), leaf(3, 4)
        pending, first = self.twice(model, x, compiler)
        buffers = {name: (p.grad, p.grad._version) for name, p in model.named_parameters()}
        pending.run()
        for name, p in model.named_parameters():
            assert p.grad is buffers[name][0]
            assert p.grad._version > buffers[name][1]
            torch.testing.assert_close(p.grad, first[name] * 2)

    def test_sums_are_autograds_bit_by_bit_without_a_compiler(self):
        """A weight used twice: autograd adds up the two terms before it adds them to what is there."""

        def tied(self, x):
            return self.a(self.a(x).tanh())

        model, plain, x = Lambda(tied), Lambda(tied), leaf(33, 4)
        plain.load_state_dict(model.state_dict())
        for _ in range(4):
            put_off(model, x).run()
            backward_of_sum(plain, x.detach().requires_grad_())
        assert all(equal(p.grad, grads(plain)[name]) for name, p in model.named_parameters())

    def test_a_hook_gets_the_gradient_by_itself(self):
        model, x = mlp(), leaf(3, 4)
        pending, first = self.twice(model, x)
        seen, sums = [], []
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        model[2].weight.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.clone()))
        pending.run()
        assert_same({"0.weight": seen[0], "2.weight": sums[0]}, {"0.weight": first["0.weight"], "2.weight": first["2.weight"] * 2})
        assert (len(seen), len(sums)) == (1, 1)
        assert_same(grads(model), {name: g * 2 for name, g in first.items()})

    def test_hooks_of_the_accumulating_node_fire_once(self):
        """DDP's reducer has such."""
        model, x = mlp(), leaf(3, 4)
        pending, _ = self.twice(model, x)
        fired = []
        nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
        for i, node in enumerate(nodes):
            node.register_hook(lambda *_, i=i: fired.append(i))
        pending.run()
        assert sorted(fired) == [0, 1, 2, 3]

    @pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
    @pytest.mark.parametrize("odd", ODD)
    def test_a_gradient_that_is_there_otherwise_than_usual(self, odd):
        model, x = mlp(), leaf(3, 4)
        reference = copy.deepcopy(model)
        model[0].weight.grad, reference[0].weight.grad = ODD[odd](), ODD[odd]()
        put_off(model, x).run()
        backward_of_sum(reference, x)
        assert_same(grads(model), grads(reference))
        assert model[0].weight.grad.layout is reference[0].weight.grad.layout

    def test_a_gradient_that_w_reads(self):
        model, x = nn.Linear(4, 4, bias=False), leaf(4, 4)
        reference = copy.deepcopy(model)
        for each in (model, reference):
            each.weight.grad = torch.arange(16.0).view(4, 4)
        compiled(model)(x)
        with twobp_fx.defer_weight_grads() as pending:
            compiled(model)(x).backward(model.weight.grad)
        pending.run()
        reference(x.detach()).backward(reference.weight.grad)
        assert_same(grads(model), grads(reference))

    def test_a_gradient_in_another_dtype_than_the_parameters(self):
        def gradients(compile_it):
            torch.manual_seed(1)
            model = mlp().bfloat16()
            for p in model.parameters():
                p.grad_dtype = torch.float32
            call = compiled(model) if compile_it else model
            for _ in range(3):
                deferred(lambda: backward_of_sum(call, torch.randn(3, 4, dtype=torch.bfloat16)))()
            return grads(model)

        expected = gradients(False)
        assert all(gradient.dtype is torch.float32 for gradient in expected.values())
        assert_same(gradients(True), expected)

    def test_a_compiler_that_fails_while_gradients_are_there(self):
        """They may be incomplete by then, and running it once more would make them wrong: it says so, and cannot be run again."""
        failing = [False]

        def compiler(graph, examples):
            def run(*args):
                if failing[0]:
                    raise ValueError("out of order")
                return graph(*args)

            return run

        model, x = mlp(), leaf(3, 4)
        pending, _ = self.twice(model, x, compiler)
        failing[0] = True
        with pytest.raises(ValueError, match="out of order") as caught:
            pending.run()
        assert any("Set the gradients to zero and repeat" in note for note in caught.value.__notes__)
        assert len(pending) == 0


class TestContext:
    """What is inside of the context and what is not."""

    def test_outside_a_backward_is_whole_again(self):
        model, x = mlp(), leaf(3, 4)
        call = compiled(model)
        original = torch.autograd.backward
        with twobp_fx.defer_weight_grads() as pending:
            assert torch.autograd.backward is not original
        assert torch.autograd.backward is original
        backward_of_sum(call, x)
        assert len(pending) == 0
        assert_same(grads(model), expected_grads(model, x))

    def test_what_somebody_else_put_in_place_of_backward_stays(self, monkeypatch):
        calls = []
        original = torch.autograd.backward

        def theirs(*args, **kwargs):
            calls.append(kwargs.get("inputs"))
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "backward", theirs)
        model, x = mlp(), leaf(3, 4)
        with twobp_fx.defer_weight_grads():
            model(x).sum().backward(inputs=[x])
        assert torch.autograd.backward is theirs
        assert len(calls) == 1

    def test_the_innermost_context_gets_it(self):
        model, x = mlp(), leaf(3, 4)
        call = compiled(model)
        with twobp_fx.defer_weight_grads() as outer:
            backward_of_sum(call, x)
            with twobp_fx.defer_weight_grads() as inner:
                backward_of_sum(call, x)
                backward_of_sum(call, x)
            backward_of_sum(call, x)
        assert (len(outer), len(inner)) == (2, 2)
        outer.run()
        inner.run()
        torch.testing.assert_close(grads(model), {name: g * 4 for name, g in expected_grads(model, x).items()})

    def test_an_exception_loses_no_gradient(self):
        model, x = mlp(), leaf(3, 4)
        kept = []

        def fail():
            with twobp_fx.defer_weight_grads() as pending:
                kept.append(pending)
                backward_of_sum(compiled(model), x)
                raise ValueError("in the middle")

        with pytest.raises(ValueError, match="in the middle") as caught:
            fail()
        assert caught.value.__notes__ == ["1 weight gradients are pending: run() or drop() them on what defer_weight_grads() gave."]
        kept[0].run()
        assert_same(grads(model), expected_grads(model, x))

    def test_an_exception_in_a_backward_leaves_the_calls_as_they_were(self):
        model, x = mlp(), leaf(3, 4)

        def fail(gradient):
            raise ValueError("a hook")

        call = compiled(model)
        middle = call(x)
        handle = middle.register_hook(fail)
        loss = middle.sum()
        with twobp_fx.defer_weight_grads() as pending, contextlib.suppress(ValueError):
            loss.backward(retain_graph=True)
        assert len(pending) == 0
        handle.remove()
        loss.backward()
        assert model[0].weight.grad is not None

    def test_threads_do_not_see_each_others_queues(self):
        model, x = mlp(), torch.randn(3, 4)
        expected = expected_grads(model, x)
        call = compiled(model)
        call(x)
        failures, counts = [], {}
        barrier = threading.Barrier(3, timeout=60)
        models = [model, *(mlp() for _ in range(2))]
        for other in models[1:]:
            other.load_state_dict(model.state_dict())
        calls = [compiled(each) for each in models]
        for each in calls:
            backward_of_sum(each, x)
        for each in models:
            each.zero_grad()

        def work(i):
            try:
                with twobp_fx.defer_weight_grads() if i < 2 else contextlib.nullcontext([]) as pending:
                    barrier.wait()
                    backward_of_sum(calls[i], x)
                    barrier.wait()
                    counts[i] = len(pending), models[i][0].weight.grad is None
                if i < 2:
                    pending.run()
            except BaseException as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert counts == {0: (1, True), 1: (1, True), 2: (0, False)}
        for each in models:
            assert_same(grads(each), expected)

    def test_threads_that_share_a_compiled_module(self):
        model, xs = mlp(), [torch.randn(3, 4) for _ in range(4)]
        for x in xs:
            backward_of_sum(model, x)
        expected = grads(model)
        model.zero_grad()
        call = compiled(model)
        call(xs[0])
        queues, failures = [], []
        barrier = threading.Barrier(len(xs), timeout=60)

        def work(x):
            try:
                loss = call(x).abs().pow(2).sum()
                barrier.wait()
                with twobp_fx.defer_weight_grads() as pending:
                    loss.backward()
                queues.append(pending)
            except BaseException as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(x,)) for x in xs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert all(p.grad is None for p in model.parameters())
        assert [pending.run() for pending in queues] == [1] * len(xs)
        torch.testing.assert_close(grads(model), expected)

    def test_w_in_another_thread(self):
        model, x = mlp(), leaf(3, 4)
        pending = put_off(model, x)
        thread = threading.Thread(target=pending.run)
        thread.start()
        thread.join(60)
        assert_same(grads(model), expected_grads(model, x))


class TestHooks:
    def counted(self, model):
        log = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g, n=name: log.append(("hook", n)))
            p.register_post_accumulate_grad_hook(lambda p, n=name: log.append(("after", n)))
        return log

    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    def test_a_hook_fires_once_at_w(self, compiler):
        model = mlp()
        log = self.counted(model)
        pending = put_off(model, leaf(3, 4), compiler=compiler)
        assert log == []
        pending.run()
        assert sorted(log) == sorted((kind, name) for kind in ("hook", "after") for name, _ in model.named_parameters())

    def test_a_hook_may_change_the_gradient(self):
        def step(call, x):
            for p in getattr(call, "_orig_mod", call).parameters():
                p.register_hook(lambda g: g * 3)
            backward_of_sum(call, x)

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_hooks_of_the_inputs_fire_at_i(self):
        x, log = leaf(3, 4), []
        x.register_hook(lambda g: log.append("hook"))
        x.register_post_accumulate_grad_hook(lambda x: log.append("after"))
        pending = put_off(mlp(), x)
        assert log == ["hook", "after"]
        pending.run()
        assert log == ["hook", "after"]

    def test_an_optimizer_in_the_backward(self):
        def trained(compile_it):
            torch.manual_seed(1)
            model = mlp()
            for p in model.parameters():
                optimizer = torch.optim.SGD([p], 0.1)

                def step(p, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step)
            call = compiled(model) if compile_it else model
            for _ in range(3):
                deferred(backward_of_sum)(call, leaf(3, 4))
            return dict(model.named_parameters())

        assert_same(trained(True), trained(False))

    def test_a_retained_gradient_in_the_middle(self):
        def step(call, x):
            middle = call(x)
            middle.retain_grad()
            middle.pow(2).sum().backward()
            return middle.grad

        assert_as_eager(mlp(), leaf(3, 4), step=step)


class TestKept:
    """What cannot be put off is computed in I, and the table says why."""

    def assert_kept(self, step, parts, why, waiting):
        """`step(*parts)` with some of `parts` compiled, against eager."""
        calls = [compiled(part) for part in parts]
        step(*parts)
        expected = [grads(part) for part in parts]
        for part in parts:
            part.zero_grad()
        with twobp_fx.defer_weight_grads() as pending:
            step(*calls)
        assert why in str(pending)
        assert len(pending) == waiting
        pending.run()
        for part, gradients in zip(parts, expected, strict=True):
            assert_same(grads(part), gradients)

    def test_a_parameter_shared_by_two_modules(self):
        first, second, x = mlp(), mlp(), leaf(3, 4)
        second[0].weight = first[0].weight
        self.assert_kept(
            lambda a, b: b(a(x)).pow(2).sum().backward(),
            [first, second],
            "0.weight: this backward also reaches it on another way",
            waiting=2,
        )

    def test_a_module_used_twice(self):
        x = leaf(3, 4)
        self.assert_kept(
            lambda a: a(a(x)).pow(2).sum().backward(), [mlp()], "2.bias: this backward also reaches it on another way", waiting=0
        )

    def test_a_parameter_in_the_loss(self):
        model, x = mlp(), leaf(3, 4)
        self.assert_kept(
            lambda a: (a(x).pow(2).sum() + model[0].weight.pow(2).sum()).backward(), [model], "0.weight: this backward", waiting=1
        )

    def test_a_parameter_that_is_a_root(self):
        model, x = Lambda(lambda m, x: m.a(x) * m.scale), leaf(3, 4)
        ones = torch.ones(4)
        self.assert_kept(
            lambda a: torch.autograd.backward([a(x).sum(), model.scale], [None, ones]), [model], "scale: this backward", waiting=1
        )

    def test_a_parameters_own_edge_among_the_roots(self):
        model, x = Lambda(lambda m, x: m.a(x) * m.scale), leaf(3, 4)
        self.assert_kept(
            lambda a: torch.autograd.backward([a(x).sum(), get_gradient_edge(model.scale)], [None, torch.ones(4)]),
            [model],
            "scale: this backward",
            waiting=1,
        )

    def test_roots_that_occur_twice(self):
        def step(call, x, y):
            output = call(x).sum()
            ones = torch.ones(3, 4)
            torch.autograd.backward([output, output, y, y, get_gradient_edge(y)], [None, None, ones, ones, ones])

        assert_as_eager(mlp(), leaf(3, 4), leaf(3, 4), step=step)

    def test_a_parameter_given_as_an_input_of_another_module(self):
        first, second, x = mlp(), Lambda(lambda m, x, w: m.a(x) @ w), leaf(3, 4)
        self.assert_kept(
            lambda a, b: b(x, a(x).t() @ first[2].weight.t()[:3, :4]).sum().backward(),
            [first, second],
            "2.weight: this backward also",
            waiting=2,
        )

    @pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
    def test_a_parametrization_inside_of_the_graph(self, how):
        assert_as_eager(nn.Sequential(how(nn.Linear(4, 4)), nn.GELU(), nn.Linear(4, 4)), leaf(3, 4))

    def test_a_weight_that_is_computed_outside_of_the_graph(self):
        def step(call, x, w):
            call(x, w * 2).sum().backward()

        assert_as_eager(Lambda(lambda m, x, w: F.linear(m.a(x), w)), leaf(3, 4), leaf(4, 4), step=step)

    def test_a_sparse_gradient(self):
        def gradients(compile_it):
            torch.manual_seed(1)
            first, second = (nn.Embedding(11, 4, sparse=True) for _ in range(2))
            second.weight = first.weight
            model, ids = nn.Sequential(first, nn.Linear(4, 4)), torch.randint(11, (2, 3))
            call = compiled(model) if compile_it else model
            deferred(lambda: (call(ids).sum() + second(ids).sum()).backward())()
            deferred(lambda: call(ids).sum().backward())()
            return {name: p.grad.to_dense() for name, p in model.named_parameters()}

        assert_same(gradients(True), gradients(False))

    def test_dynamic_sizes_and_a_shared_parameter(self):
        def step(call, *args):
            for x in args:
                call(call(x)).pow(2).sum().backward()

        assert_as_eager(mlp(), *(leaf(n, 4) for n in (3, 5, 2)), step=step, dynamic=True)


class TestCheckpoints:
    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_around_a_compiled_module(self, reentrant, compiler):
        def step(call, x):
            checkpoint(call, x, use_reentrant=reentrant).pow(2).sum().backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step, compiler=compiler, tolerance=1e-4)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_before_and_after_a_compiled_module(self, reentrant):
        def step(call, x):
            before = checkpoint(torch.sin, x, use_reentrant=reentrant)
            checkpoint(torch.cos, call(before), use_reentrant=reentrant).pow(2).sum().backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_inside_of_a_compiled_module(self):
        assert_as_eager(Lambda(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False))), leaf(3, 4))

    def test_dropout_inside_of_one_is_drawn_again_as_it_was(self):
        def forward(m, x):
            return m.b(checkpoint(lambda y: F.dropout(m.a(y).sin(), 0.5).sin(), x, use_reentrant=False))

        def step(call, *args):
            for loss in [call(x).sum() for x in args]:
                loss.backward()

        assert_as_eager(Lambda(forward), leaf(3, 4), leaf(3, 4), step=step)

    def test_a_compiled_module_inside_and_outside_of_a_reentrant_one(self):
        def step(call, x):
            checkpoint(call, call(x), use_reentrant=True).pow(2).sum().backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step, tolerance=1e-5)

    def test_the_table_tells_of_a_reentrant_one(self):
        model, x = mlp(), leaf(3, 4)
        with twobp_fx.defer_weight_grads() as pending:
            compiled(model)(checkpoint(torch.sin, x, use_reentrant=True)).sum().backward()
        assert len(pending) == 0
        assert "0.weight: this backward passes through a checkpoint with use_reentrant=True" in str(pending)
        assert model[0].weight.grad is not None


class TestChanged:
    """What W reads must be as it was in I."""

    def test_w_after_an_optimizer_step(self):
        model, x = Lambda(lambda m, x: m.a(x) * m.scale.sin()), leaf(3, 4)
        pending = put_off(model, x)
        given = model.scale.grad = torch.ones(4)
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(InputError, match=r"scale was changed in place after .* \(it is at version 1; expected version 0\)"):
            pending.run()
        assert len(pending) == 1
        assert model.scale.grad is given
        pending.drop()

    def test_a_parameter_that_w_does_not_read_may_change(self):
        model, x = mlp(), leaf(3, 4)
        expected = expected_grads(model, x)
        pending = put_off(model, x)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        pending.run()
        assert_same(grads(model), expected)

    def test_w_after_its_input_was_changed(self):
        model, x = mlp(), torch.randn(3, 4)
        pending = put_off(model, x)
        x.zero_()
        with pytest.raises(InputError, match=r"cannot be computed any more: args\[0\] was changed in place"):
            pending.run()
        pending.drop()

    def test_w_after_the_gradient_it_was_given_was_changed(self):
        output, gradient = compiled(mlp())(leaf(3, 4)), torch.ones(3, 4)
        with twobp_fx.defer_weight_grads() as pending:
            output.backward(gradient)
        gradient.zero_()
        with pytest.raises(InputError, match="the gradient of output 0 was changed in place"):
            pending.run()
        pending.drop()

    def test_each_of_several_is_checked(self):
        model, xs = mlp(), [torch.randn(3, 4) for _ in range(2)]
        call = compiled(model)
        with twobp_fx.defer_weight_grads() as pending:
            for x in xs:
                backward_of_sum(call, x)
        xs[1].zero_()
        with pytest.raises(InputError, match="was changed in place"):
            pending.run()
        assert len(pending) == 1
        pending.drop()

    def test_a_parameter_frozen_before_w(self):
        model, x = mlp(), leaf(3, 4)
        expected = expected_grads(model, x)
        pending = put_off(model, x)
        model.requires_grad_(False)
        pending.run()
        assert_same(grads(model), expected)
        assert not any(p.requires_grad for p in model.parameters())

    def test_a_parameter_frozen_before_i(self):
        def step(call, x):
            loss = call(x).sum()
            parameter = next(iter(getattr(call, "_orig_mod", call).parameters()))
            parameter.requires_grad_(False)
            loss.backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step)


class TestMemory:
    def test_what_only_i_needs_is_freed_after_i(self):
        made = []

        def compiler(graph, examples):
            def run(*args):
                results = graph(*args)
                own = {each.untyped_storage().data_ptr() for each in args}
                made.extend(each.untyped_storage() for each in results if each.untyped_storage().data_ptr() not in own)
                return results

            return run

        model, x = Lambda(lambda m, x: m.a(x.exp()).sin()), leaf(5, 4)
        output = compiled(model, compiler)(x)
        saved = [weakref.ref(each) for each in made]  # exp(x), which I and W need; a(exp(x)), which I needs; and the output
        made.clear()
        with twobp_fx.defer_weight_grads() as pending:
            output.sum().backward()
        del output
        made.clear()
        assert len(saved) == 3
        assert sum(each() is not None for each in saved) == 1
        pending.run()
        made.clear()
        assert not any(each() is not None for each in saved)

    @pytest.mark.parametrize("end", ["run", "drop"])
    def test_nothing_is_held_after_w(self, end):
        model, x = mlp(), torch.randn(3, 4)
        call = compiled(model)
        with twobp_fx.defer_weight_grads() as pending:
            backward_of_sum(call, x)
        (each,) = pending
        held = weakref.ref(x)
        del x
        gc.collect()
        assert held() is not None
        getattr(each, end)()
        gc.collect()
        assert held() is None

    def test_a_graph_that_is_never_run_backward_is_freed(self):
        call = compiled(mlp())
        x = torch.randn(3, 4)
        output = call(x)
        held = weakref.ref(x)
        del x, output
        gc.collect()
        assert held() is None
