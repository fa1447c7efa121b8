"""The `twobp` command: print what the split does to a model, and what a plan does.

Exit codes: 0 done, 2 the user's mistake (one message on stderr). Only reports go to stdout; what the user's own code
prints while it is imported and traced goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .api import Pipe, compile
from .emit import COMPILERS
from .errors import InputError, TwobpError
from .inspect import describe_split, print_plan, print_split
from .schedules import SCHEDULES, Costs, build

_PRINT_HELP = """\
What the module must offer:
  the factory you name        (**args) -> torch.nn.Module
  example_batch(model)        -> (arguments, target): one micro-batch. arguments is a tuple of positional arguments, or
                              a dict of keyword arguments; target is what loss_fn compares with, or None
  loss_fn(output, target)     -> scalar tensor; leave it out if the model returns its loss, or an object with .loss

The current directory is on the import path, as with `python -m`. Nothing is trained and no file is written.

Examples:
  twobp print examples.gpt:build --stages 4
  twobp print examples.gpt:build --stages 4 --stage 1 --graph weight
  twobp print examples.gpt:build --cut blocks.1 blocks.3 --args '{"width": 64}' --json
"""

_PLAN_HELP = """\
Rows are ranks, columns are units of time: 2F0 is the forward of micro-batch 0 at stage 2; F forward, I backward-input,
W backward-weight, B both at once (two units); a dot is idle time. With --times, the whole step is drawn to scale.

Examples:
  twobp plan zb-h1 --ranks 4 --microbatches 8
  twobp plan interleaved-1f1b --ranks 4 --chunks 3
  twobp plan zb-v --ranks 8 --microbatches 24 --times 9.3 9.0 4.7 --comm 0.6
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. `argv`: the arguments without the program's name; None for sys.argv's. Returns the exit code.

    Wrong usage exits with SystemExit(2), --help and --version with SystemExit(0), as argparse does.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        with _working_directory_importable():
            command(arguments)
            sys.stdout.flush()
    except TwobpError as error:
        print(f"twobp: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twobp", description="Pipeline-parallel training with a split backward.")
    parser.add_argument("--version", action="version", version=f"twobp-fx {_version()} (torch {torch.__version__})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_print(commands)
    _add_plan(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], *, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A command's parser; the epilog is printed as it stands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=run)
    return parser


def _add_print(commands: Any) -> None:
    parser = _add_command(
        commands,
        "print",
        _print,
        summary="print what the split does to a model",
        description="Capture a model, cut it into stages, split each backward, and print the result.",
        epilog=_PRINT_HELP,
    )
    parser.add_argument("target", metavar="MODULE:FACTORY", help="what makes the model, such as examples.gpt:build")
    cut = parser.add_mutually_exclusive_group(required=True)
    cut.add_argument("--stages", type=int, metavar="N", help="cut into N stages, balanced by cost")
    cut.add_argument("--cut", nargs="+", metavar="FQN", help="begin a new stage at each of these modules")
    parser.add_argument(
        "--schedule", default="1f1b-1", metavar="NAME", help="a schedule's name, or a CSV file (default: %(default)s)"
    )
    parser.add_argument(
        "--compiler",
        choices=COMPILERS,
        default="eager",
        help="whose decompositions to trace with; nothing is compiled (default: %(default)s)",
    )
    parser.add_argument("--stage", type=int, metavar="K", help="print the graphs of stage K, not the numbers of all")
    parser.add_argument("--graph", metavar="NAME", help="of that stage only forward, input, weight or backward")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--args", default="{}", metavar="JSON", help="keyword arguments for the factory, a JSON object")
    parser.add_argument("--meta", action="store_true", help="make the model without its data, for sizes that do not fit in memory")


def _add_plan(commands: Any) -> None:
    parser = _add_command(
        commands,
        "plan",
        _plan,
        summary="print a schedule's plan and what it costs",
        description="Make a plan, simulate it, at equal times (F = I = W = 1, B = 2) by default, and print both.",
        epilog=_PLAN_HELP,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--ranks", type=int, required=True, metavar="R", help="how many ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", help="how many micro-batches (default: the schedule's)")
    parser.add_argument("--chunks", type=int, metavar="V", help="stages a rank (default: the schedule's)")
    parser.add_argument("--times", type=float, nargs=3, metavar=("F", "I", "W"), help="times of a stage's F, I and W")
    parser.add_argument("--comm", type=float, metavar="T", help="time of a message to another rank (with --times)")
    parser.add_argument("--unsplit", action="store_true", help="run the full backward B in place of I and W")
    parser.add_argument("--csv", action="store_true", help="print the plan in torch's compute-only CSV format")


def _print(arguments: argparse.Namespace) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        pipe = _capture(arguments)
    if arguments.json:
        print(json.dumps(describe_split(pipe, stage=arguments.stage, graph=arguments.graph), indent=2))
    else:
        print_split(pipe, stage=arguments.stage, graph=arguments.graph)


def _plan(arguments: argparse.Namespace) -> None:
    plan = build(
        arguments.name,
        ranks=arguments.ranks,
        microbatches=arguments.microbatches,
        chunks=arguments.chunks,
        split_backward=not arguments.unsplit,
    )
    if arguments.csv:
        print(plan.to_csv(), end="")
    else:
        print_plan(plan, _costs(arguments))


def _costs(arguments: argparse.Namespace) -> Costs | None:
    if arguments.times is None:
        if arguments.comm is not None:
            raise InputError("--comm has no unit without --times; give the times of F, I and W, too.")
        return None
    forward, backward_input, backward_weight = arguments.times
    return Costs(forward, backward_input, backward_weight, comm=arguments.comm or 0.0)


def _capture(arguments: argparse.Namespace) -> Pipe:
    """The pipe of the model that the user named, captured with its example batch and not compiled."""
    module, factory = _import(arguments.target)
    keywords = _json_object(arguments.args)
    fake_mode = _fake_mode() if arguments.meta else None
    with fake_mode or contextlib.nullcontext():
        model = _call(arguments.target, factory, **keywords)
        if not isinstance(model, nn.Module):
            raise InputError(f"{arguments.target} returned a {type(model).__name__}, not a torch.nn.Module.")
        example_batch = getattr(module, "example_batch", None)
        if not callable(example_batch):
            raise InputError(
                f"Module '{module.__name__}' has no example_batch: define example_batch(model) -> (arguments, target), "
                "one micro-batch to trace the model with (see twobp print --help)."
            )
        batch = _call(f"{module.__name__}:example_batch", example_batch, model)
    loss_fn = getattr(module, "loss_fn", None)
    args, kwargs = _example(module, batch, with_target=loss_fn is not None)
    if fake_mode is not None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, fake_mode.from_tensor, (args, kwargs))
    return compile(
        model,
        arguments.stages if arguments.cut is None else arguments.cut,
        loss_fn=loss_fn,
        example_args=args,
        example_kwargs=kwargs,
        schedule=arguments.schedule,
        compiler=arguments.compiler,
    )


def _import(target: str) -> tuple[ModuleType, Callable[..., Any]]:
    name, _, path = target.partition(":")
    if not name or not path:
        raise InputError(f"{target!r} does not say what makes the model: write MODULE:FACTORY, such as examples.gpt:build.")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise InputError(f"Cannot import '{name}': {_reason(error)}") from error
    value: Any = module
    for part in path.split("."):
        if not hasattr(value, part):
            raise InputError(f"'{name}' has no '{path}'. Name the function that returns the model.")
        value = getattr(value, part)
    if not callable(value):
        raise InputError(f"{target} is a {type(value).__name__}, not a function that returns the model.")
    return module, value


def _call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the user's code; what it raises becomes one message."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise InputError(f"{name} raised {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The error, with the innermost place in the user's code, if it came that far."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _is_users(filename: str) -> bool:
    own = (__file__, importlib.__file__, os.path.dirname(torch.__file__) + os.sep, "<frozen importlib")
    return not filename.startswith(own)


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--args is no JSON: {error}. Write an object, such as '{{\"width\": 64}}'.") from error
    if not isinstance(value, dict):
        raise InputError(f"--args must be a JSON object of keyword arguments, such as '{{\"width\": 64}}', not {text}.")
    return value


def _example(module: ModuleType, batch: Any, *, with_target: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments in what example_batch returned, as `compile` takes them."""
    if not isinstance(batch, tuple) or len(batch) != 2 or not isinstance(batch[0], (tuple, dict)):
        raise InputError(
            f"{module.__name__}:example_batch must return (arguments, target): arguments a tuple of positional "
            "arguments or a dict of keyword arguments, target a tensor or None."
        )
    given, target = batch
    args, kwargs = ((), dict(given)) if isinstance(given, dict) else (given, {})
    if with_target:
        kwargs["target"] = target
    elif target is not None:
        raise InputError(
            f"{module.__name__}:example_batch returned a target, and the module has no loss_fn(output, target). Define "
            "one, or return None for the target if the model returns its loss."
        )
    return args, kwargs


def _fake_mode() -> Any:
    """A mode under which tensors have no data.

    Not torch.device("meta"): operators choose other implementations there, some without a gradient (torch 2.13:
    nll_loss), so that the graphs would not be those of the real model.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _working_directory_importable() -> Iterator[None]:
    """The current directory first on the import path, as `python -m` has it."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _version() -> str:
    try:
        return importlib.metadata.version("twobp-fx")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
