"""The sweep: every operator and module of PyTorch's own test databases as a small stage, split and compared with plain autograd.

    python -m tests.sweep [--samples 3] [--only NAME ...] [--table tests/sweep.csv]

Each sample becomes a stage with a parameter before, inside (where the operator takes more than one floating-point tensor) and after
the operator. I then W must equal the unsplit B bit by bit (compiler="eager"), both must equal plain autograd, None must stay None.
The outcome of an entry is that of its worst sample: right; refused (by an error of ours, with its reason); wrong; or error (of
anything else). The table is kept: `tests/test_sweep.py` holds that a sample of it comes out the same.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.helpers import Lowered, assert_split_is_exact, equal, lower_module, tangents_for
from tests.helpers import run as run_lowered
from twobp_fx.errors import TwobpError

TABLE = Path(__file__).with_suffix(".csv")
ORDER = ("right", "not applicable", "refused", "error", "wrong")
"""Outcomes, best first."""


@dataclass(frozen=True)
class Entry:
    """One row: where it is from, its name, and what makes its samples, each a stage and its arguments."""

    source: str
    name: str
    samples: Callable[[], Iterator[tuple[nn.Module, tuple[Tensor, ...]]]]


@dataclass(frozen=True)
class Outcome:
    """How an entry came out, and why if not right."""

    result: str
    reason: str = ""


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
    """Every operator of `op_db` that torch can differentiate in float32 on the CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
            yield Entry("op_db", f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name, _samples_of(op))


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
    worst = Outcome("not applicable", "no sample has a floating-point tensor that requires a gradient")
    for number, (stage, arguments) in enumerate(itertools.islice(entry.samples(), samples)):
        found = run(stage, arguments)
        if number == 0 or ORDER.index(found.result) > ORDER.index(worst.result):
            worst = found
    return worst


def run(stage: nn.Module, arguments: tuple[Tensor, ...]) -> Outcome:
    """Split one stage and compare."""
    torch.manual_seed(0)
    try:
        results = stage(*arguments)
        if not any(result.requires_grad for result in results):
            return Outcome("not applicable", "nothing that it returns has a gradient")
        lowered = lower_module(stage, *arguments)
        if draws(stage, arguments):
            assert_halves_are_the_whole(lowered)
        else:
            assert_split_is_exact(lowered, rtol=1e-4, atol=1e-5)
    except TwobpError as error:
        return Outcome("refused", _first_line(error))
    except AssertionError as error:
        return Outcome("wrong", _first_line(error))
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {_first_line(error)}")
    return Outcome("right")


def draws(stage: nn.Module, arguments: tuple[Tensor, ...]) -> bool:
    """Whether the stage draws random numbers: two seeds, two results. Plain autograd cannot be given the same draws."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            results.append(copy.deepcopy(stage)(*arguments))
    return not all(equal(a, b) for a, b in zip(*results, strict=True))


def assert_halves_are_the_whole(lowered: Lowered) -> None:
    """I then W is bitwise B, outputs and gradients, under the same draws."""
    given = tangents_for(lowered)
    halves, whole = (run_lowered(lowered, given, split=split, model=copy.deepcopy(lowered.model)) for split in (True, False))
    assert halves[1].keys() == whole[1].keys()
    assert all(equal(gradient, whole[1][name]) for name, gradient in halves[1].items()), "I then W differs from B"
    assert all(equal(a, b) for a, b in zip(halves[0], whole[0], strict=True)), "another draw"


def _first_line(error: BaseException) -> str:
    line = str(error).strip().split("\n")[0]
    return re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"/\S*/", "", line))[:200]


def entries() -> list[Entry]:
    """All rows of the table, in order."""
    return [*operators(), *modules()]


def read_table(path: Path = TABLE) -> dict[tuple[str, str], Outcome]:
    """The kept table."""
    with path.open(newline="") as file:
        return {(row["source"], row["name"]): Outcome(row["outcome"], row["reason"]) for row in csv.DictReader(file)}


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of entries")
    parser.add_argument("--every", type=int, default=1, help="each n-th entry alone")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[Entry, Outcome] = {}
    for entry in entries()[:: options.every]:
        if options.only and entry.name not in options.only:
            continue
        random.seed(0)
        torch.manual_seed(0)
        found[entry] = outcome(entry, options.samples)
        if found[entry].result != "right":
            print(entry.source, entry.name, found[entry].result, found[entry].reason, flush=True)
    print(Counter(each.result for each in found.values()), file=sys.stderr)
    if options.table:
        with options.table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("source", "name", "outcome", "reason"))
            writer.writerows((e.source, e.name, o.result, o.reason) for e, o in found.items())


if __name__ == "__main__":
    main()
