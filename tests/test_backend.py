"""`torch.compile(module, backend="twobp")`: each step against the same step run eagerly, with W at once and with W put off."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.two_tensor import TwoTensor

import twobp_fx
from examples import bert
from tests.backend_helpers import assert_as_eager, backward_of_sum, compiled, deferred, fresh_dynamo, state_after
from tests.helpers import equal, leaf
from twobp_fx.errors import CompileError, InputError, SplitError

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh():
    with fresh_dynamo():
        yield


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Lambda(nn.Module):
    """Two linear layers, a buffer and a parameter that nothing need use; the forward is `function(self, *args)`."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("buffer", torch.randn(4))
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class TestOptions:
    def test_the_backend_is_found_by_its_name(self):
        assert "twobp" in torch._dynamo.list_backends()

    def test_the_compiler_is_inductor_unless_another_is_asked_for(self):
        model, x = mlp(), leaf(3, 4)
        call = torch.compile(model, backend="twobp")
        torch.testing.assert_close(call(x), model(x))
        assert twobp_fx.backend._compiler(None, {}) == "inductor"

    def test_a_compiler_of_ones_own_gets_every_graph(self):
        seen = []

        def compiler(graph, examples):
            seen.append(len(examples))
            return graph

        model = mlp()
        backward_of_sum(compiled(model, compiler), leaf(3, 4))
        assert len(seen) == 2
        assert model[0].weight.grad is not None

    def test_an_unknown_option_is_named_and_the_known_ones_are_listed(self):
        call = torch.compile(mlp(), backend="twobp", options={"compiler": "eager", "speed": 11})
        with pytest.raises(Exception, match=r"no option 'speed'\. It has: 'compiler'"):
            call(leaf(3, 4))

    def test_a_mode_is_refused(self):
        call = torch.compile(mlp(), backend="twobp", mode="max-autotune")
        with pytest.raises(Exception, match=r"mode='max-autotune'.*no modes"):
            call(leaf(3, 4))

    def test_called_by_hand_the_backend_raises_its_own_errors(self):
        graph = torch.fx.symbolic_trace(mlp())
        with pytest.raises(InputError, match="no option"):
            twobp_fx.backend.twobp(graph, [], options={"speed": 11})
        with pytest.raises(InputError, match="'fast' is unknown"):
            twobp_fx.backend.twobp(graph, [], options={"compiler": "fast"})

    def test_a_compiler_that_fails_is_named_with_its_reason(self):
        def broken(graph, examples):
            raise ValueError("no such instruction")

        with pytest.raises(Exception, match="no such instruction") as caught:
            compiled(mlp(), broken)(leaf(3, 4))
        assert "CompileError" in str(caught.value) or isinstance(caught.value, CompileError)


MODELS = {
    "mlp": (mlp, lambda: (leaf(3, 4),)),
    "convolutions with batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        lambda: (leaf(2, 2, 8, 8),),
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: (leaf(2, 5, 8),),
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), lambda: (leaf(3, 4),)),
    "token ids": (lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4)), lambda: (torch.randint(11, (2, 5)),)),
    "doubles": (lambda: mlp().double(), lambda: (torch.randn(3, 4, dtype=torch.double, requires_grad=True),)),
    "complex numbers": (
        lambda: nn.Linear(4, 4, dtype=torch.complex64),
        lambda: (torch.randn(3, 4, dtype=torch.complex64, requires_grad=True),),
    ),
    "an empty batch": (mlp, lambda: (leaf(0, 4),)),
    "an unused parameter": (lambda: Lambda(lambda m, x: m.a(x).relu()), lambda: (leaf(3, 4),)),
    "a layer used twice": (lambda: Lambda(lambda m, x: m.a(m.a(x).relu()) * m.scale), lambda: (leaf(3, 4),)),
    "an unused input": (lambda: Lambda(lambda m, x, y: m.a(x)), lambda: (leaf(3, 4), leaf(3, 4))),
    "an input that is a number": (lambda: Lambda(lambda m, n, x, s: m.a(x) * n + s), lambda: (3, leaf(3, 4), 0.5)),
    "an input that wants no gradient": (mlp, lambda: (torch.randn(3, 4),)),
    "no parameter in use": (lambda: Lambda(lambda m, x: x.sin()), lambda: (leaf(3, 4),)),
    "detached in the middle": (lambda: Lambda(lambda m, x: m.b(m.a(x).detach() + x)), lambda: (leaf(3, 4),)),
    "a no_grad region": (lambda: Lambda(lambda m, x: m.b(x) * no_grad(m.a, x)), lambda: (leaf(3, 4),)),
    "batch norm by hand": (lambda: Lambda(lambda m, x: moving_average(m, x)), lambda: (leaf(3, 4),)),
    "a weight clamped in the forward": (
        lambda: Lambda(lambda m, x: (no_grad(m.a.weight.clamp_, -0.1, 0.1), m.a(x))[1]),
        lambda: (leaf(3, 4),),
    ),
    "a function with its own backward": (
        lambda: Lambda(lambda m, x: Product.apply(m.a(x), m.scale.expand(3, 4))),
        lambda: (leaf(3, 4),),
    ),
    "a branch on a value": (
        lambda: Lambda(lambda m, x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (m.a(x),))),
        lambda: (leaf(3, 4),),
    ),
    "a size that depends on values": (lambda: Lambda(lambda m, x: m.a(x)[x.sum(-1) > 0]), lambda: (leaf(3, 4),)),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last),
        lambda: (leaf(2, 2, 8, 8),),
    ),
    "a graph break": (lambda: Lambda(lambda m, x: m.b(broken_off(m.a(x)))), lambda: (leaf(3, 4),)),
}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return None


def no_grad(function, *args):
    with torch.no_grad():
        return function(*args)


def moving_average(m, x):
    y = m.a(x)
    with torch.no_grad():
        m.buffer.lerp_(y.mean(0), 0.1)
    return y - m.buffer * m.scale


def broken_off(x):
    torch._dynamo.graph_break()
    return x.relu()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_as_eager(name):
    make, args = MODELS[name]
    assert_as_eager(make(), *args())


@pytest.mark.parametrize("name", ["mlp", "convolutions with batch norm", "transformer layer", "token ids", "a graph break"])
def test_a_step_by_inductor_is_as_eager(name):
    make, args = MODELS[name]
    assert_as_eager(make(), *args(), compiler="inductor", tolerance=1e-4)


class TestBackward:
    """What autograd offers goes on working."""

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_several_forwards_before_their_backwards(self, order):
        def step(call, *args):
            outputs = [call(x) for x in args]
            for i in order:
                outputs[i].pow(2).sum().backward()

        assert_as_eager(MODELS["convolutions with batch norm"][0](), *(leaf(2, 2, 8, 8) for _ in range(3)), step=step)

    def test_retain_graph_and_a_second_backward(self):
        def step(call, x):
            loss = call(x).pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_a_second_backward_without_retain_graph_is_refused_as_by_eager(self):
        model, x = mlp(), leaf(3, 4)
        loss = compiled(model)(x).sum()
        loss.backward()
        before = model[0].weight.grad.clone()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert torch.equal(model[0].weight.grad, before)

    def test_gradients_of_chosen_inputs(self):
        model, x = mlp(), leaf(3, 4)
        expected = torch.autograd.grad(model(x).sum(), [x, model[2].weight])
        with twobp_fx.defer_weight_grads() as pending:
            found = torch.autograd.grad(compiled(model)(x).sum(), [x, model[2].weight])
            chosen = compiled(model)(x).sum()
            chosen.backward(inputs=[model[0].weight])
        assert all(map(equal, found, expected))
        assert len(pending) == 0
        assert model[0].weight.grad is not None
        assert x.grad is None

    def test_a_gradient_of_a_gradient_is_refused(self):
        x = leaf(3, 4)
        output = compiled(mlp())(x).pow(2).sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.sum().backward()

    def test_no_graph_under_no_grad(self):
        model, x = mlp(), leaf(3, 4)
        call = compiled(model)
        with torch.no_grad():
            found = call(x)
        assert torch.equal(found, model(x))
        assert not found.requires_grad

    def test_no_graph_under_inference_mode(self):
        model, x = mlp(), torch.randn(3, 4)
        with torch.inference_mode():
            assert torch.equal(compiled(model)(x), model(x))

    def test_hooks_fire_as_in_eager(self):
        def fired(compile_it):
            torch.manual_seed(5)
            model, x = mlp(), leaf(3, 4)
            log = []
            for name, p in model.named_parameters():
                p.register_hook(lambda g, n=name: log.append((n, "hook", g.clone())))
                p.register_post_accumulate_grad_hook(lambda p, n=name: log.append((n, "after", p.grad.clone())))
            x.register_hook(lambda g: log.append(("x", "hook", g.clone())))
            (compiled(model) if compile_it else model)(x).sum().backward()
            return {(n, kind): g for n, kind, g in log}, len(log)

        found, count = fired(True)
        expected, expected_count = fired(False)
        assert count == expected_count == 9
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    def test_a_hook_may_change_a_gradient(self):
        def step(call, x):
            x.register_hook(lambda g: g * 3)
            backward_of_sum(call, x)

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_one_module_called_twice_in_one_loss(self):
        assert_as_eager(mlp(), leaf(3, 4), leaf(3, 4), step=lambda call, x, y: (call(x) * call(y)).sum().backward())

    def test_a_module_called_on_its_own_output(self):
        assert_as_eager(mlp(), leaf(3, 4), step=lambda call, x: call(call(x)).sum().backward())

    def test_an_output_that_is_not_used(self):
        def step(call, x):
            first, _ = call(x)
            first.sum().backward()

        assert_as_eager(Lambda(lambda m, x: (m.a(x), m.b(x))), leaf(3, 4), step=step)

    def test_an_unused_output_of_a_module_before_another(self):
        def step(call, x):
            first, _ = call(x)
            call(first)[1].sum().backward()

        assert_as_eager(Lambda(lambda m, x: (m.a(x), m.b(x))), leaf(3, 4), step=step)

    def test_no_gradient_arrives_at_all(self):
        assert_as_eager(mlp(), leaf(3, 4), step=lambda call, x: (NoGradient.apply(call(x)).sum() + x.sum()).backward())

    @pytest.mark.parametrize("tangent", [lambda: torch.randn(4, 3).t(), lambda: torch.randn(1).expand(3, 4)], ids=["t", "expanded"])
    def test_a_given_gradient_of_another_layout(self, tangent):
        assert_as_eager(mlp(), leaf(3, 4), step=lambda call, x: call(x).backward(tangent()))

    def test_saved_tensors_on_their_way_through_hooks(self):
        def step(call, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                output = call(x)
            output.pow(2).sum().backward()

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_edges_of_the_graph_as_roots(self):
        def step(call, x):
            output = call(x)
            torch.autograd.backward([get_gradient_edge(output), output.sum()], [torch.ones(3, 4), None])

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda call, x: call(x).backward(),
            lambda call, x: torch.autograd.backward([call(x)], [torch.ones(3)]),
            lambda call, x: torch.ones(1).backward(),
        ],
        ids=["no scalar", "another shape", "no graph"],
    )
    def test_what_autograd_refuses_it_refuses_in_the_same_words(self, wrong):
        def step(call, x):
            with pytest.raises(RuntimeError) as caught:
                wrong(call, x)
            return str(caught.value)

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    def test_frozen_parameters_get_no_gradient(self, compiler):
        model = mlp()
        model[0].requires_grad_(False)
        assert_as_eager(model, leaf(3, 4), compiler=compiler, tolerance=0 if compiler == "eager" else 1e-5)

    def test_a_parameter_frozen_after_the_first_step(self):
        def step(call, x, y):
            backward_of_sum(call, x)
            parameter = next(iter(getattr(call, "_orig_mod", call).parameters()))
            parameter.requires_grad_(False)
            backward_of_sum(call, y)

        assert_as_eager(mlp(), leaf(3, 4), leaf(3, 4), step=step)


class TestValues:
    """What goes into a module and comes out of it."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: (m.a(x), [m.b(x)], None),
            lambda m, x: {"loss": m.a(x).sum(), "none": None, "text": "abc"},
            lambda m, x: {"out": m.a(x), "same": x},
        ],
        ids=["tuple", "dict", "dict with its input"],
    )
    def test_structures_come_out_as_they_are(self, function):
        def step(call, x):
            result = call(x)
            tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
            sum(t.pow(2).sum() for t in tensors).backward()
            return result

        assert_as_eager(Lambda(function), leaf(3, 4), step=step)

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: (m.a(x).view(-1), m.a(x)[1:]),
            lambda m, x: (lambda y: (y, y.view(-1), y.t()))(m.a(x)),
            lambda m, x: (x.view(-1), m.b(x)),
            lambda m, x: (x, x + m.scale),
        ],
        ids=["views", "views of one output", "a view of the input", "the input"],
    )
    def test_outputs_that_are_views(self, function):
        def step(call, x):
            x = x * 1  # views of a leaf may not be written to
            outputs = call(x)
            outputs[0].mul_(2)
            sum(t.pow(2).sum() for t in outputs[:1]).backward()
            return outputs

        assert_as_eager(Lambda(function), leaf(3, 4), step=step)

    def test_parameters_may_come_as_inputs(self):
        model, x, w = Lambda(lambda m, x, w: F.linear(m.a(x), w)), leaf(3, 4), leaf(4, 4)
        other = nn.Parameter(w.detach().clone())
        backward_of_sum(model, x, w)
        expected = (w.grad, model.a.weight.grad)
        model.zero_grad()
        with twobp_fx.defer_weight_grads() as pending:
            backward_of_sum(compiled(model), x, other)
            assert other.grad is None
        pending.run()
        assert equal(other.grad, expected[0])
        assert equal(model.a.weight.grad, expected[1])

    def test_two_modules_with_equal_names_in_one_graph(self):
        first, second, x = mlp(), mlp(), leaf(3, 4)
        second(first(x)).sum().backward()
        expected = [p.grad for model in (first, second) for p in model.parameters()]
        for p in (*first.parameters(), *second.parameters()):
            p.grad = None
        call = compiled(lambda x: second(first(x)))
        with twobp_fx.defer_weight_grads() as pending:
            call(x).sum().backward()
        (each,) = pending
        assert len(each.parameters) == 8
        pending.run()
        assert all(map(equal, [p.grad for model in (first, second) for p in model.parameters()], expected))

    def test_functional_call(self):
        model, x = mlp(), leaf(3, 4)
        weights = {name: nn.Parameter(torch.randn_like(p)) for name, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (x,)).sum().backward()
        expected = {name: p.grad for name, p in weights.items()}
        weights = {name: nn.Parameter(p.detach()) for name, p in weights.items()}
        call = compiled(lambda weights, x: torch.func.functional_call(model, weights, (x,)))
        deferred(lambda: call(weights, x).sum().backward())()
        assert all(equal(weights[name].grad, expected[name]) for name in expected)

    def test_a_compiler_that_lays_its_results_out_in_its_own_way(self):
        def compiler(graph, examples):
            def run(*args):
                assert all(a.stride() == e.stride() for a, e in zip(args, examples, strict=True) if isinstance(a, Tensor))
                return [r.transpose(0, 1).contiguous().transpose(0, 1) if r.dim() > 1 else r for r in graph(*args)]

            return run

        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
        assert_as_eager(model, leaf(2, 3, 4), compiler=compiler)

    def test_a_tensor_subclass(self):
        def model(function):
            torch.manual_seed(1)
            model = function(Lambda(lambda m, x: m.b(m.a(x).relu())))
            getattr(model, "_orig_mod", model).b.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
            return model

        def gradients(model):
            each = [p.grad for p in model.parameters() if p.grad is not None]
            return [inner for g in each for inner in ((g.a, g.b) if isinstance(g, TwoTensor) else (g,))]

        x = torch.randn(3, 4)
        for step in (backward_of_sum, deferred(backward_of_sum)):
            ours, eager = model(compiled), model(lambda m: m)
            step(ours, x)
            backward_of_sum(eager, x)
            assert len(gradients(eager)) == 8
            assert all(map(equal, gradients(ours), gradients(eager)))

    def test_an_operator_that_torch_keeps_in_order(self, capfd):
        assert_as_eager(Lambda(lambda m, x: (torch._print("hello"), m.a(x))[1]), leaf(3, 4))
        assert capfd.readouterr().out.split() == ["hello"] * 3

    def test_autocast_around_the_call(self):
        def step(call, x):
            with torch.autocast("cpu", torch.bfloat16):
                output = call(x)
            output.float().pow(2).sum().backward()
            return output

        assert_as_eager(mlp(), leaf(3, 4), step=step)

    def test_autocast_inside(self):
        def forward(m, x):
            with torch.autocast("cpu", torch.bfloat16):
                return m.b(m.a(x).relu()).float()

        assert_as_eager(Lambda(forward), leaf(3, 4))

    def test_dropout_draws_what_eager_draws(self):
        assert_as_eager(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)), leaf(3, 4))

    def test_drawing_again_in_the_backward_is_refused(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
        with torch._functorch.config.patch(activation_memory_budget=0.0), pytest.raises(Exception, match="draw random") as caught:
            compiled(model)(leaf(3, 4)).sum().backward()
        assert "SplitError" in str(caught.value) or isinstance(caught.value, SplitError)


class TestMutation:
    """What a module writes in place."""

    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: (lambda y: (m.buffer.mul_(2), y)[1])(m.a(x) * m.buffer.clone()).sin(),
            lambda m, x: (lambda y: (m.buffer.view(2, 2)[0].add_(1), y)[1])(m.a(x) * m.buffer.view(2, 2).t().reshape(4)).sin(),
            lambda m, x: (lambda y: (m.buffer.copy_(x.detach().sum(0)), y)[1])(m.a(x) * m.buffer.exp()).sin(),
        ],
        ids=["scaled", "through a view", "replaced"],
    )
    def test_a_saved_buffer_that_is_overwritten(self, function, compiler):
        def step(call, *args):
            for loss in [call(x).sum() for x in args]:
                loss.backward()

        tolerance = 0 if compiler == "eager" else 1e-4
        assert_as_eager(Lambda(function), leaf(3, 4), leaf(3, 4), leaf(3, 4), step=step, compiler=compiler, tolerance=tolerance)

    def test_a_saved_input_that_is_overwritten(self):
        def forward(m, x, state):
            y = m.a(x) * state.clone()
            state.mul_(2)
            return y

        def step(call, x, state):
            for loss in [call(x, state).sum() for _ in range(3)]:
                loss.backward()
            return state

        assert_as_eager(Lambda(forward), leaf(3, 4), torch.randn(4), step=step)

    def test_inputs_that_share_storage(self):
        def forward(m, x, y):
            x.mul_(2)
            return m.a(x + y) * m.scale

        def step(call, base):
            output = call(base[:, :4], base[:, 2:6])
            output.pow(2).sum().backward()
            return base

        assert_as_eager(Lambda(forward), torch.randn(3, 8), step=step)

    def test_what_the_module_refuses_eagerly_it_refuses_compiled(self):
        def forward(m, x):
            y = m.a(x) * m.buffer
            m.buffer.mul_(2)
            return y

        with pytest.raises(Exception, match="modified by an inplace operation"):
            backward_of_sum(compiled(Lambda(forward)), leaf(3, 4))


class TestDynamicSizes:
    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    @pytest.mark.parametrize("name", ["mlp", "transformer layer"])
    def test_batches_of_any_size(self, name, compiler):
        def step(call, *args):
            return [backward_of_sum(call, x) for x in args]

        args = [leaf(n, *MODELS[name][1]()[0].shape[1:]) for n in (3, 5, 2, 7)]
        assert_as_eager(MODELS[name][0](), *args, step=step, compiler=compiler, tolerance=1e-4)

    @pytest.mark.parametrize("settings", [{}, {"dynamic": True}], ids=["found out", "asked for"])
    def test_not_every_size_is_compiled_anew(self, settings):
        def backend(graph, examples):
            return twobp_fx.backend.twobp(graph, examples, options={"compiler": "eager"})

        counter = CompileCounterWithBackend("eager")
        counter.backend = backend
        call = torch.compile(mlp(), backend=counter, **settings)
        for n in (3, 5, 2, 7, 11):
            backward_of_sum(call, leaf(n, 4))
        assert counter.frame_count == (1 if settings else 2)

    def test_a_size_that_is_marked(self):
        def step(call, *args):
            for x in args:
                torch._dynamo.mark_dynamic(x, 0)
                backward_of_sum(call, x)

        assert_as_eager(mlp(), leaf(3, 4), leaf(5, 4), step=step)

    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    def test_a_shared_weight(self, compiler):
        """W of a weight that is also used outside of the graph."""

        def step(call, *args):
            weight = getattr(call, "_orig_mod", call).a.weight
            return [(call(x) @ weight).pow(2).sum().backward() for x in args]

        model = Lambda(lambda m, x: m.b(m.a(x).relu()))
        assert_as_eager(model, *(leaf(n, 4) for n in (3, 5, 2)), step=step, compiler=compiler, tolerance=1e-4)

    @pytest.mark.parametrize("compiler", ["eager", "inductor"])
    def test_two_sizes_whose_product_is_one(self, compiler):
        """W takes sizes that are related by a view alone, and returns nothing that would tell what they mean."""

        def step(call, *args):
            for x in args:
                call(x, None).pow(2).sum().backward()

        args = (leaf(2, 16, 8), leaf(1, 8, 8), leaf(3, 12, 8))
        assert_as_eager(bert.Block(8, 2), *args, step=step, compiler=compiler, tolerance=1e-4)

    def test_a_size_among_the_arguments(self):
        def step(call, *args):
            return [call(n, x).pow(2).sum().backward() for n, x in zip((2, 3, 4), args, strict=True)]

        model = Lambda(lambda m, n, x: m.a(x[:n]) * n + x.shape[0])
        assert_as_eager(model, *(leaf(6, 4) for _ in range(3)), step=step, dynamic=True)

    def test_no_compiled_code_outlives_its_assumption_on_a_size(self):
        def step(call, *args):
            return [backward_of_sum(call, x) for x in args]

        model = Lambda(lambda m, x: m.a(x) * (2 if x.shape[0] > 4 else 3))
        assert_as_eager(model, *(leaf(n, 4) for n in (3, 5, 2, 7)), step=step, dynamic=True)

    @pytest.mark.parametrize(("settings", "count"), [({"dynamic": False}, 1), ({"dynamic": True}, 4)], ids=["fixed", "dynamic"])
    def test_symbolic_sizes_are_compiled_while_they_can_be_guarded(self, settings, count):
        graphs = []

        def compiler(graph, examples):
            graphs.append(graph)
            return graph

        output = compiled(mlp(), compiler, **settings)(leaf(3, 4))
        assert len(graphs) == count
        output.sum().backward()
        assert len(graphs) == max(count, 2)


class TestComposed:
    """Several compiled modules, and compiled modules inside of others."""

    def test_compiled_modules_in_a_chain(self):
        def model():
            torch.manual_seed(1)
            return mlp(), mlp(), mlp()

        x = leaf(3, 4)
        eager, ours = model(), model()
        expected = nn.Sequential(*eager)(x)
        expected.sum().backward()
        calls = [compiled(each) for each in ours]
        x.grad, before = None, x.grad
        with twobp_fx.defer_weight_grads() as pending:
            calls[2](calls[1](calls[0](x))).sum().backward()
        assert equal(x.grad, before)
        assert len(pending) == 3
        assert pending.run() == 3
        for a, b in zip(nn.ModuleList(eager).parameters(), nn.ModuleList(ours).parameters(), strict=True):
            assert equal(a.grad, b.grad)

    def test_a_compiled_module_inside_of_another(self):
        inner = mlp()
        model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))
        x = leaf(3, 4)
        expected = state_after(backward_of_sum, model, [x])
        inner.compile(backend="twobp", options={"compiler": "eager"})
        deferred(backward_of_sum)(compiled(model), x)
        for name, p in model.named_parameters():
            assert equal(p.grad, expected[f"gradient of {name}"])

    def test_an_embedding_tied_across_two_compiled_modules(self):
        def model():
            torch.manual_seed(1)
            embedding, head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            head.weight = embedding.weight
            return embedding, head

        ids = torch.randint(11, (2, 5))
        (embedding, head), (our_embedding, our_head) = model(), model()
        head(embedding(ids)).pow(2).sum().backward()
        first, second = compiled(our_embedding), compiled(our_head)
        deferred(lambda: second(first(ids)).pow(2).sum().backward())()
        assert equal(our_embedding.weight.grad, embedding.weight.grad)

    def test_a_copy_of_a_compiled_module_is_its_own(self):
        model, x = mlp(), leaf(3, 4)
        expected = state_after(backward_of_sum, model, [x])
        call = compiled(model)
        backward_of_sum(call, x)
        twin = copy.deepcopy(call)
        twin.zero_grad()
        deferred(backward_of_sum)(twin, x)
        for name, p in twin._orig_mod.named_parameters():
            assert equal(p.grad, expected[f"gradient of {name}"])

    def test_module_compile_in_place(self):
        model, x = Lambda(lambda m, x: m.b(m.a(x).relu())), leaf(3, 4)
        expected = state_after(backward_of_sum, model, [x])
        model.compile(backend="twobp", options={"compiler": "eager"})
        deferred(backward_of_sum)(model, x)
        for name, p in model.named_parameters():
            assert equal(p.grad, expected[f"gradient of {name}"])
