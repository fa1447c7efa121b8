"""The sweep: every operator and module of PyTorch's own test databases as a small stage, split and compared with plain autograd.

    python -m tests.sweep [--jobs 2] [--samples 3] [--only NAME ...] [--table tests/sweep.csv]

Each sample becomes a stage with a parameter before, inside (where the operator takes more than one floating-point tensor) and
after the operator. It runs two micro-batches: both F, both I, then both W, with the random state moved in between. That must
equal two B bit by bit (compiler="eager"), both must equal plain autograd with the same draws, None must stay None, and nothing
may be held in the end. The outcome of an entry is that of its worst sample: right; refused (by an error of ours, with its
reason); wrong; or error (of anything else). Beside it stands what torch.compile(backend="aot_eager") makes of the same samples.
`make sweep` writes the table that is kept; `tests/test_sweep.py` holds that a part of it comes out the same.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import itertools
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.helpers import Lowered, call, equal, lower_module, tangents_for
from twobp_fx.errors import TwobpError
from twobp_fx.runtime.stage import derive_seed

ORDER = ("right", "not applicable", "refused", "error", "wrong")
"""Outcomes, best first."""
MICROBATCHES = 2


@dataclass(frozen=True)
class Entry:
    """One row: where it is from, its name, and what makes its samples, each a stage and its arguments."""

    source: str
    name: str
    samples: Callable[[], Iterator[tuple[nn.Module, tuple[Tensor, ...]]]]


@dataclass(frozen=True)
class Outcome:
    """How an entry came out, why if not right, and what torch.compile's own "aot_eager" made of it."""

    result: str
    reason: str = ""
    baseline: str = ""


class OperatorStage(nn.Module):
    """`op(*args, **kwargs)`: the first tensor that wants a gradient is the stage's input, others that do are parameters."""

    def __init__(self, op: Callable[..., Any], call: tuple[Any, ...]) -> None:
        super().__init__()
        leaves, self._spec = pytree.tree_flatten(call)
        self._op = op
        self._values: list[Any] = []
        self.arguments: tuple[Tensor, ...] = ()
        for leaf in leaves:
            number = len(self._values)
            if not isinstance(leaf, Tensor):
                self._values.append(leaf)
            elif leaf.requires_grad and not self.arguments:
                self.arguments = (leaf.detach().clone().requires_grad_(),)
                self.before = nn.Parameter(torch.full_like(leaf.detach(), 1.0))
                self._values.append(None)
                self._position = number
            elif leaf.requires_grad:
                self.register_parameter(f"inside{number}", nn.Parameter(leaf.detach().clone()))
                self._values.append(f"inside{number}")
            else:
                self.register_buffer(f"given{number}", leaf.detach().clone())
                self._values.append(f"given{number}")
        self._tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        self.after = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        values = [
            x * self.before if number == self._position else getattr(self, value) if tensor else value
            for number, (value, tensor) in enumerate(zip(self._values, self._tensors, strict=True))
        ]
        args, kwargs = pytree.tree_unflatten(values, self._spec)
        result = self._op(*args, **kwargs)
        parts = [part for part in pytree.tree_leaves(result) if isinstance(part, Tensor)]
        return tuple(part * self.after.to(part.dtype) if part.is_floating_point() or part.is_complex() else part for part in parts)


def operators() -> Iterator[Entry]:
    """Every operator that torch can differentiate in float32 on the CPU: its own, custom ones, and those that take functions."""
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.custom_op_db import custom_op_db
    from torch.testing._internal.hop_db import hop_db

    _let_operators_draw()
    databases = {"op_db": op_db, "autograd_function_db": autograd_function_db, "custom_op_db": custom_op_db, "hop_db": hop_db}
    for source, database in databases.items():
        for op in database:
            if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
                yield Entry(source, f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name, _samples_of(op))


def _let_operators_draw() -> None:
    """The databases set the seed inside of a random operator's call, which no capture keeps. Here it is set around the stage."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            vars(module)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)


def _samples_of(op: Any) -> Callable[[], Iterator[tuple[nn.Module, tuple[Tensor, ...]]]]:
    def samples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
            stage = OperatorStage(op.op, ((sample.input, *sample.args), dict(sample.kwargs)))
            if stage.arguments:
                yield stage, stage.arguments

    return samples


def modules() -> Iterator[Entry]:
    """Every module of `module_db` in training mode, with a parameter before it."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        yield Entry("module_db", info.name, _module_samples_of(info))


def _module_samples_of(info: Any) -> Callable[[], Iterator[tuple[nn.Module, tuple[Tensor, ...]]]]:
    def samples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
        made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
        for sample in made:
            if sample.forward_input is None:
                continue
            module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            forward = sample.forward_input
            stage = OperatorStage(module, (tuple(forward.args), dict(forward.kwargs)))
            if stage.arguments:
                yield stage, stage.arguments

    return samples


def outcome(entry: Entry, samples: int) -> Outcome:
    """Run an entry's first samples."""
    random.seed(0)
    torch.manual_seed(0)
    worst = Outcome("not applicable", "no sample has a floating-point tensor that requires a gradient")
    baseline = "right"
    for number, (stage, arguments) in enumerate(itertools.islice(entry.samples(), samples)):
        found, compared = run(stage, arguments)
        if number == 0 or ORDER.index(found.result) > ORDER.index(worst.result):
            worst = found
        if found.result != "not applicable" and ORDER.index(compared) > ORDER.index(baseline):
            baseline = compared
    return Outcome(worst.result, worst.reason, baseline if worst.result != "not applicable" else "")


def run(stage: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Outcome, str]:
    """Split one stage and compare; and what comes of it with aot_eager."""
    try:
        if not any(result.requires_grad for result in call(copy.deepcopy(stage), arguments)):
            return Outcome("not applicable", "nothing that it returns has a gradient"), ""
        lowered = lower_module(stage, *arguments)
        tangents = [tangents_for(lowered, seed) for seed in range(MICROBATCHES)]
        expected = by_autograd(stage, arguments, [list(given.values()) for given in tangents])
        halves, whole = (by_us(lowered, tangents, split=split) for split in (True, False))
        halves.assert_equal(whole)
        halves.assert_close(expected)
        found = Outcome("right")
    except TwobpError as error:
        found = Outcome("refused", _first_line(error))
    except AssertionError as error:
        found = Outcome("wrong", _first_line(error))
    except Exception as error:  # whatever it is, it is a fault of ours, and this row's: the other rows are still to be run
        found = Outcome("error", f"{type(error).__name__}: {_first_line(error)}")
    return found, with_aot_eager(stage, arguments)


def with_aot_eager(stage: nn.Module, arguments: tuple[Tensor, ...]) -> str:
    """Whether torch.compile(backend="aot_eager") gets the stage right."""
    torch._dynamo.reset()
    try:
        generator = torch.Generator().manual_seed(0)
        results = [result for result in call(copy.deepcopy(stage), arguments) if result.requires_grad]
        tangents = [[torch.randn(each.shape, generator=generator).to(each.dtype) for each in results] for _ in range(MICROBATCHES)]
        compiled = torch.compile(copy.deepcopy(stage), backend="aot_eager", dynamic=False)
        by_autograd(compiled, arguments, tangents).assert_close(by_autograd(stage, arguments, tangents))
    except AssertionError:
        return "wrong"
    except Exception:  # torch's own failure, of any kind, is what this column shows
        return "error"
    return "right"


class Results:
    """What two micro-batches leave: outputs, gradients by name (`input <position> of <micro-batch>`), and buffers."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def assert_equal(self, other: Results) -> None:
        """Bit by bit."""
        assert all(equal(a, b) for a, b in zip(self.outputs, other.outputs, strict=True)), "outputs of F differ"
        for one, two in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            assert one.keys() == two.keys()
            for name, value in one.items():
                assert equal(value, two[name]), f"{name}: I then W differs from B"

    def assert_close(self, other: Results) -> None:
        """Up to rounding; the same gradients are missing."""
        missing = other.gradients.keys() - self.gradients.keys()
        added = self.gradients.keys() - other.gradients.keys()
        assert not missing, f"no gradient of {sorted(missing)}"
        assert not added, f"a gradient that autograd leaves None: {sorted(added)}"
        torch.testing.assert_close(self.outputs, other.outputs, rtol=1e-4, atol=1e-5, equal_nan=True)
        for one, two in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            for name, value in two.items():
                torch.testing.assert_close(
                    one[name], value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda said, name=name: f"{name}: {said}"
                )


def by_us(lowered: Lowered, tangents: Sequence[Mapping[str, Tensor]], *, split: bool) -> Results:
    """All F, then all I and all W, or all B."""
    found = Results()
    model = copy.deepcopy(lowered.model)
    (runner,) = lowered.runners([lowered.args] * len(tangents), model)
    with torch.no_grad():
        for i in range(len(tangents)):
            values = runner.forward(i, {})
            found.outputs += [values[name].clone() for name in lowered.output_names]
            torch.rand(3)
        for i, given in enumerate(tangents):
            (runner.backward_input if split else runner.backward)(i, given)
        for i in range(len(tangents) if split else 0):
            runner.backward_weight(i)
    assert runner.held == 0, "something is held after the last backward"
    found.gradients = dict(runner.gradients)
    for i, by_input in runner.input_gradients.items():
        found.gradients |= {f"input {key} of {i}": value for key, value in by_input.items()}
    found.buffers = dict(model.named_buffers())
    return found


def by_autograd(stage: nn.Module, arguments: Sequence[Tensor], tangents: Sequence[Sequence[Tensor]]) -> Results:
    """Plain autograd, with the draws that our runner takes; changes neither the stage nor its arguments."""
    found = Results()
    own = stage if isinstance(stage, torch._dynamo.OptimizedModule) else copy.deepcopy(stage)
    for i, given in enumerate(tangents):
        torch.manual_seed(derive_seed(7, 0, i))
        taken = [each.detach().clone().requires_grad_(each.requires_grad) for each in arguments]
        results = call(own, taken)
        found.outputs += [result.detach().clone() for result in results]
        torch.autograd.backward([result for result in results if result.requires_grad], list(given))
        found.gradients |= {f"input {j} of {i}": each.grad for j, each in enumerate(taken) if each.grad is not None}
    found.gradients |= {_name(name): each.grad for name, each in own.named_parameters() if each.grad is not None}
    found.buffers = {_name(name): buffer for name, buffer in own.named_buffers()}
    return found


def _name(name: str) -> str:
    return name.removeprefix("_orig_mod.")


def _first_line(error: BaseException) -> str:
    line = str(error).strip().split("\n")[0]
    return re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"/\S*/|(?<=\.py):\d+", "", line))[:200]


@functools.cache
def entries() -> dict[tuple[str, str], Entry]:
    """All rows of the table, in order, by source and name."""
    return {(entry.source, entry.name): entry for entry in (*operators(), *modules())}


def outcome_of(key: tuple[str, str], samples: int) -> Outcome:
    """The outcome of the entry of that source and name."""
    return outcome(entries()[key], samples)


def _start_worker(directory: str) -> None:
    os.chdir(directory)  # where torch leaves the graphs that its partitioner fails on
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--samples", type=int, default=3, help="of each entry")
    parser.add_argument("--only", nargs="*", help="names of entries")
    parser.add_argument("--every", type=int, default=1, help="each n-th entry alone")
    parser.add_argument("--table", type=Path, help="write the outcomes to this file")
    options = parser.parse_args()
    keys = [key for key in list(entries())[:: options.every] if not options.only or key[1] in options.only]
    found: dict[tuple[str, str], Outcome] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(options.jobs, get_context("spawn"), _start_worker, (directory,)) as pool,
    ):
        for key, each in zip(keys, pool.map(functools.partial(outcome_of, samples=options.samples), keys), strict=True):
            found[key] = each
            if each.result != "right":
                print(*key, each.result, each.reason, f"(aot_eager: {each.baseline})", flush=True)
    counts = Counter(each.result for each in found.values())
    print(", ".join(f"{count} {result}" for result, count in counts.items()), file=sys.stderr)
    if options.table:
        with options.table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("source", "name", "outcome", "aot_eager", "reason"))
            writer.writerows((*key, each.result, each.baseline, each.reason) for key, each in found.items())


if __name__ == "__main__":
    main()
