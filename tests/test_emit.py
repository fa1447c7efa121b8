"""Emission: what is compiled once and what apart, a compiler's failures, and that I leaves alone what W still reads."""

import gc
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.helpers import (
    Lowered,
    assert_split_is_exact,
    autograd_microbatches,
    backward_graph,
    equal,
    leaf,
    lower_module,
    tangents_for,
)
from twobp_fx.emit import Compiled, Emitter, structure
from twobp_fx.errors import CompileError, InputError
from twobp_fx.passes.graph import operations
from twobp_fx.program import GRAPH_NAMES

torch.set_num_threads(1)


class Recording:
    """A compiler that runs the graph as it is, and keeps a list of what it was given."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        assert [tuple(t.shape) for t in examples] == [tuple(n.meta["val"].shape) for n in module.graph.find_nodes(op="placeholder")]
        self.graphs.append(module)
        return module


def compile_all(lowered: Lowered) -> None:
    for program in lowered.programs:
        for name in GRAPH_NAMES:
            program.prepare(name)


class TestOnce:
    def test_like_stages_are_compiled_once(self):
        compiler = Recording()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
        lowered = lower_module(model, leaf(2, 4), stages=["1", "2", "3", "4"], emitter=Emitter(compiler))
        compile_all(lowered)
        assert len(compiler.graphs) == 4  # F, I, W and B of one stage
        assert_split_is_exact(lowered)
        assert len(compiler.graphs) == 4

    def test_a_first_stage_has_a_backward_of_its_own(self):
        compiler = Recording()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        lowered = lower_module(model, torch.randn(2, 4), stages=["1", "2"], emitter=Emitter(compiler))
        assert compiler.graphs == []  # on demand
        compile_all(lowered)
        assert_split_is_exact(lowered)
        assert all(operations(graph.graph) for graph in compiler.graphs), "an empty graph needs no compiler"

    def test_shapes_are_compiled_apart(self):
        compiler = Recording()
        emitter = Emitter(compiler)
        for shape in ((2, 4), (3, 4), (2, 4)):
            lowered = lower_module(nn.Linear(4, 4), leaf(*shape), emitter=emitter)
            lowered.program.compiled("forward")
            assert_split_is_exact(lowered)
        assert len({structure(g) for g in compiler.graphs}) == len(compiler.graphs) == 8

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (lambda x: x * 2.0, lambda x: x * 2.0000000000000004),
            (lambda x: x * 2.0, lambda x: x * 2),
            (lambda x: x.sum(0, keepdim=True) + x, lambda x: x.sum(1, keepdim=True) + x),
            (lambda x: x - x.t(), lambda x: x.t() - x),
            (lambda x: (x.sin(), x.cos()), lambda x: (x.cos(), x.sin())),
            (lambda x: x.sin(), lambda x: (x.sin(), x.sin())),
            (lambda x: x.to(torch.float64), lambda x: x.to(torch.bfloat16)),
            (lambda x: torch.full_like(x, float("inf")) * x, lambda x: torch.full_like(x, -float("inf")) * x),
        ],
        ids=["last bit", "float or int", "dimension", "order", "outputs", "count", "dtype", "infinity"],
    )
    def test_different_graphs_are_compiled_apart(self, first, second):
        def graph(function: Callable[[Tensor], Any]) -> fx.GraphModule:
            return backward_graph(lambda h: [function(h)], {"h": torch.randn(3, 3)}, [])

        assert structure(graph(first)) == structure(graph(first))
        assert structure(graph(first)) != structure(graph(second))

    @pytest.mark.parametrize(
        "other",
        [torch.randn(4, 3).t(), torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 5), torch.randn(3, 8)[:, ::2]],
        ids=["strides", "dtype", "shape", "stepped"],
    )
    def test_different_inputs_are_compiled_apart(self, other):
        def graph(value: Tensor) -> fx.GraphModule:
            return backward_graph(lambda h: (h.sin(),), {"h": value}, ["x"])

        assert structure(graph(torch.randn(3, 4))) == structure(graph(torch.randn(3, 4)))
        assert structure(graph(torch.randn(3, 4))) != structure(graph(other))

    def test_names_do_not_matter(self):
        first = backward_graph(lambda a, b: (a * b,), {"a": torch.randn(3), "b": torch.randn(3)}, ["x"])
        second = backward_graph(lambda c, d: (c * d,), {"c": torch.randn(3), "d": torch.randn(3)}, ["w"])
        assert structure(first) == structure(second)

    def test_constants_are_compiled_apart(self):
        def graph(constant: Tensor) -> fx.GraphModule:
            return backward_graph(lambda h: (h * constant,), {"h": torch.randn(3)}, ["x"])

        emitter, one, two = Emitter(Recording()), torch.ones(3), torch.full((3,), 2.0)
        h = torch.randn(3)
        assert torch.equal(emitter.emit(graph(one), "one")([h])[0], h)
        assert torch.equal(emitter.emit(graph(two), "two")([h])[0], h * 2)
        assert len(emitter.compiler.graphs) == 2
        emitter.emit(graph(one), "one again")
        assert len(emitter.compiler.graphs) == 2

    def test_a_dead_constant_is_not_taken_for_a_new_one(self):
        """A compiler may copy a constant and let go of it; its address may then belong to another."""

        def copying(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            (node,) = module.graph.find_nodes(op="get_attr")
            constant = getattr(module, node.target).clone()
            return lambda h: (h * constant,)

        def scaling(factor: int) -> fx.GraphModule:
            constant = torch.full((3,), float(factor))
            return backward_graph(lambda h: (h * constant,), {"h": h}, ["x"])

        emitter, h = Emitter(copying), torch.randn(3)
        gc.collect()
        gc.freeze()  # the collections below look at what the loop makes, and are quick
        try:
            for factor in range(30):
                assert torch.equal(emitter.emit(scaling(factor), "scaling")([h])[0], h * factor)
                gc.collect()
        finally:
            gc.unfreeze()


@pytest.mark.parametrize(
    "layout",
    [lambda h: h.t().contiguous().t(), lambda h: h.sum(0, keepdim=True).expand(4, 4), lambda h: h.repeat(1, 2)[:, ::2]],
    ids=["transposed", "expanded", "stepped"],
)
def test_a_compiler_may_return_other_strides(layout):
    """What F sends and saves, and what I stashes, need not come back with the strides it was traced with."""

    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(layout(self.first(x))) * layout(x)

    def contiguous(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        assert all(isinstance(t, Tensor) for t in examples)
        strides = [t.stride() for t in examples]

        def run(*args: Tensor) -> list[Tensor]:
            assert [t.stride() for t in args] == strides, "not the strides it was compiled for"
            return [value.contiguous() for value in module(*args)]

        return run

    lowered = lower_module(Crossing(), leaf(4, 4), stages=["second"], emitter=Emitter(contiguous))
    assert_split_is_exact(lowered, rtol=1e-4, atol=1e-5)


class TestFailures:
    def test_unknown_compiler(self):
        with pytest.raises(InputError, match=r"compiler='inducter' is unknown.*'inductor', 'eager'.*callable"):
            Emitter("inducter")

    @pytest.mark.parametrize("compiler", [None, 3, ""])
    def test_no_compiler(self, compiler):
        with pytest.raises(InputError, match="is unknown"):
            Emitter(compiler)

    @pytest.mark.parametrize("name", GRAPH_NAMES)
    def test_compilers_exception_names_stage_and_graph(self, name):
        def failing(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            raise ZeroDivisionError("no such instruction")

        lowered = lower_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), leaf(2, 4), stages=["1"], emitter=Emitter(failing))
        message = rf"could not compile stage 1 {name}(, accumulating)?: ZeroDivisionError: no such instruction\n.*compiler='eager'"
        with pytest.raises(CompileError, match=message) as caught:
            lowered.programs[1].prepare(name)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert not lowered.programs[1].is_prepared(name)

    def test_a_failure_is_not_remembered(self):
        attempts = itertools.count()

        def failing_once(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            if next(attempts) == 0:
                raise MemoryError
            return module

        lowered = lower_module(nn.Linear(4, 4), leaf(2, 4), emitter=Emitter(failing_once))
        with pytest.raises(CompileError, match="MemoryError"):
            lowered.program.compiled("forward")
        assert_split_is_exact(lowered)


# I must not write into what W still reads -----------------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def assert_input_leaves_saved_values_alone(lowered: Lowered) -> None:
    """Run F and I; every value that W takes, of this and of another micro-batch, is bitwise what it was before I."""
    microbatches = [(leaf(8, 16),) for _ in range(2)]
    (runner,) = lowered.runners(microbatches)
    wanted = {value.name for value in lowered.program.signatures["backward_weight"].takes}
    with torch.no_grad():
        watched: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        for i in range(2):
            runner.forward(i, {})
            values = runner.release(i)
            runner.resume(i, values)
            watched |= {(i, name): (tensor, tensor.clone()) for name, tensor in values.items() if name in wanted}
        tangents = [tangents_for(lowered, seed) for seed in range(2)]
        watched |= {(i, name): (t, t.clone()) for i in range(2) for name, t in tangents[i].items()}
        state = {name: (p, p.clone()) for name, p in lowered.model.named_parameters()}
        assert len(watched) > 2
        for i in range(2):
            runner.backward_input(i, tangents[i])
            for (microbatch, name), (now, before) in watched.items():
                assert equal(now, before), f"I of micro-batch {i} wrote into {name} of micro-batch {microbatch}"
            for name, (now, before) in state.items():
                assert equal(now.detach(), before.detach()), f"I wrote into parameter {name}"
        stashed = runner.release(1)
        copies = {name: tensor.clone() for name, tensor in stashed.items()}
        runner.resume(1, stashed)
        runner.backward_weight(0)
        assert all(equal(stashed[name], copies[name]) for name in stashed), "W wrote into another micro-batch"
        runner.backward_weight(1)
    result = dict(runner.gradients)
    result |= {f"input 0 of {i}": by_input["0"] for i, by_input in runner.input_gradients.items()}
    torch.testing.assert_close(result, autograd_microbatches(lowered, microbatches, tangents), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_input_writes_into_nothing_that_weight_reads(compiler):
    assert_input_leaves_saved_values_alone(lower_module(block(), leaf(8, 16), emitter=Emitter(compiler)))


class DonatingEmitter(Emitter):
    """Broken on purpose, as a compiler is that takes I's inputs for its own: I zeroes the input of that number."""

    def __init__(self, position: int) -> None:
        super().__init__("eager")
        self.position = position

    def emit(self, module: fx.GraphModule, label: str) -> Compiled:
        function = super().emit(module, label)
        if not label.endswith("backward_input"):
            return function

        def donating(args: Any) -> tuple[Tensor, ...]:
            results = function(args)
            args[self.position].zero_()
            return results

        return donating


def test_an_input_that_writes_is_caught():
    lowered = lower_module(block(), leaf(8, 16))
    signatures = lowered.program.signatures
    kept = {value.name for value in signatures["backward_weight"].takes}
    shared = [i for i, value in enumerate(signatures["backward_input"].takes) if value.name in kept]
    assert shared
    for position in shared:
        broken = lower_module(block(), leaf(8, 16), emitter=DonatingEmitter(position))
        with pytest.raises(AssertionError, match="I of micro-batch 0 wrote into"):
            assert_input_leaves_saved_values_alone(broken)


def test_max_pooling_is_captured_by_a_process_that_has_used_nothing_of_inductor_yet():
    """Its decomposition reaches for a module of Inductor's that only compiling imports."""
    program = (
        "import torch, twobp_fx; from torch import nn\n"
        "model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3))\n"
        "example = {'example_args': (torch.ones(1, 1, 12, 12),), 'example_kwargs': {'target': torch.ones(1, 2, 3, 3)}}\n"
        "pipe = twobp_fx.compile(model, 1, loss_fn=nn.functional.mse_loss, **example)\n"
        "assert pipe.stages[0].graphs.backward_weight.graph.nodes\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
