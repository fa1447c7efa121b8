"""Emission: a graph in, a compiled callable out. The same graph over the same shapes is compiled once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from .errors import CompileError, InputError
from .passes.graph import build_graph, is_symbolic, operations, outputs, placeholders

Compiler = str | Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
COMPILERS = ("inductor", "eager")
Compiled = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
"""A compiled graph: a sequence of tensors in, a tuple of tensors out. Run under torch.no_grad()."""


class Emitter:
    """Compiles graphs with one compiler and remembers them by structure.

    compiler: "inductor", "eager", or a callable (graph module, fake example inputs) -> callable that takes the graph's inputs
    as positional arguments and returns its outputs. Raises InputError for anything else.
    """

    def __init__(self, compiler: Compiler) -> None:
        if not callable(compiler) and compiler not in COMPILERS:
            raise InputError(
                f"compiler={compiler!r} is unknown. Use one of {', '.join(map(repr, COMPILERS))}, or a callable "
                "(graph_module, example_inputs) -> callable."
            )
        self.compiler = compiler
        self._emitted: dict[str, tuple[fx.GraphModule, Compiled]] = {}  # a graph keeps its constants, and their ids, alive

    def __deepcopy__(self, memo: dict[int, Any]) -> Emitter:
        """Compiled code is shared between copies."""
        return self

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """The decompositions to trace with: Inductor's for Inductor; none otherwise, so that each graph shows torch's operators."""
        return _inductor_decompositions() if self.compiler == "inductor" else {}

    @property
    def keeps_order(self) -> bool:
        """Whether graphs are to compute what autograd computes bit by bit, sums in its order: without a compiler."""
        return self.compiler == "eager"

    def emit(self, module: fx.GraphModule, label: str) -> Compiled:
        """Compile `module`; `label` names it in errors. Raises CompileError with the compiler's own reason."""
        key = f"{structure(module)} for {torch.get_num_threads()} threads"  # which Inductor builds into its loops
        if key not in self._emitted:
            self._emitted[key] = (module, self._compile(module, label))
        return self._emitted[key][1]

    def _compile(self, module: fx.GraphModule, label: str) -> Compiled:
        if self.compiler == "eager" or not operations(module.graph):
            return lambda args: tuple(module(*args))  # nothing to compile where values are only passed through
        if any(value is None for value in outputs(module.graph)):
            return self._around_missing(module, label)
        examples = [node.meta["val"] for node in placeholders(module.graph)]
        try:
            function = self.compiler(module, examples) if callable(self.compiler) else _inductor(module, examples)
        except Exception as error:
            raise CompileError(
                f"{self.compiler} could not compile {label}: {type(error).__name__}: {error}\n"
                "Try compiler='eager' to tell a fault of the compiler from one of the split."
            ) from error
        return lambda args: tuple(function(*args))

    def _around_missing(self, module: fx.GraphModule, label: str) -> Compiled:
        """Compile what is there: Inductor takes no graph that returns None."""
        every = outputs(module.graph)
        nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        present = self._compile(build_graph(module, placeholders(module.graph), nodes, [v for v in every if v is not None]), label)

        def run(args: Sequence[torch.Tensor]) -> tuple[Any, ...]:
            results = iter(present(args))
            return tuple(None if value is None else next(results) for value in every)

        return run


def emitter(compiler: Compiler) -> Emitter:
    """The emitter of a compiler: one for the whole process if it is named, so that pipes share what they have in common."""
    return _named(compiler) if isinstance(compiler, str) else Emitter(compiler)


@functools.cache
def _named(compiler: str) -> Emitter:
    return Emitter(compiler)


@contextlib.contextmanager
def _importing_inductor() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)  # Inductor's own imports
        yield


def _inductor(module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile a plain graph with Inductor.

    No autograd and no tracing context of a joint graph: so Inductor knows of no buffer it may overwrite ("donated buffers"), and
    I cannot write into what W still reads.
    """
    with torch.no_grad(), _importing_inductor(), contextlib.ExitStack() as stack:
        from torch._inductor import standalone_compile

        symbolic = any(map(is_symbolic, examples))
        if (
            symbolic
        ):  # what the symbols mean is known where they come from; from a graph Inductor takes its outputs', and W has none
            mode = next(each.fake_mode for each in examples if isinstance(each, FakeTensor))
            stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        function: Callable[..., Any] = standalone_compile(
            module, list(examples), dynamic_shapes="from_tracing_context" if symbolic else "from_graph"
        )
    return function


def _inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    with _importing_inductor():
        importlib.import_module("torch._inductor.lowering")  # some decompositions reach for it without importing it
        from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return table


def structure(module: fx.GraphModule) -> str:
    """A digest of what a graph computes: operators, wiring, constants, and the shape, strides, dtype and device of its inputs."""
    index: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for i, node in enumerate(module.graph.nodes):
        index[node] = i
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: f"%{index[argument]}")
        digest.update(repr((node.op, _identity(module, node), args, kwargs)).encode())
        if node.op == "placeholder":
            digest.update(repr(_layout(node.meta.get("val"))).encode())
    digest.update(repr(len(outputs(module.graph))).encode())
    return digest.hexdigest()


def _identity(module: fx.GraphModule, node: fx.Node) -> object:
    if node.op != "get_attr":
        return None if node.op in ("placeholder", "output") else str(node.target)
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        return structure(value)
    return id(value)  # a tensor constant: the same only if it is the same object


def _layout(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _sizes(value), {_environment(size) for size in _sizes(value)}, value.dtype, value.device
    return type(value), str(value), _environment(value)


def _sizes(value: object) -> tuple[object, ...]:
    return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def _environment(size: object) -> int | None:
    """What gives a symbolic size its meaning: equal names in two of them have nothing to do with each other."""
    return id(size.node.shape_env) if isinstance(size, torch.SymInt) else None
