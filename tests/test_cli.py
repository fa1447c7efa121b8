"""The `twobp` command: what it prints, what it exits with, and that JSON alone goes to stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twobp_fx.cli import main
from twobp_fx.schedules import SCHEDULES, Plan, build

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

print("importing")

def build(width=8, fail=False):
    print("building")
    if fail:
        raise RuntimeError("no such size")
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))

def example_batch(model, *, batch=4):
    return (torch.zeros(batch, model[0].in_features),), torch.zeros(batch, 4)

def loss_fn(output, target):
    return F.mse_loss(output, target)

class Holder:
    make = staticmethod(build)

number = 3
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a module of that name into the current directory; forgets it afterwards."""
    monkeypatch.chdir(tmp_path)
    written: list[str] = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def model(write: Callable[[str, str], None]) -> None:
    write("cli_model", MODEL)


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message of a command that ends in exit code 2, with nothing on stdout."""
    out, err = run(capsys, *argv, code=2)
    assert out == ""
    assert "Traceback" not in err
    message = err[err.index("twobp: error: ") :]
    return message.removeprefix("twobp: error: ")


@pytest.mark.usefixtures("model")
def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "print", "cli_model:build", "--stages", "2")
    assert out.startswith("2 stages, plan '1f1b-1': 2 ranks, 2 micro-batches.")
    assert "FLOPs" in out
    assert "importing\nbuilding\n" in err
    assert str(Path.cwd()) not in sys.path


@pytest.mark.usefixtures("model")
def test_print_one_graph(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "print", "cli_model:Holder.make", "--cut", "2", "--stage", "1", "--graph", "weight")
    assert out.startswith("Stage 1: module '2'\n\nW, backward-weight")
    assert "2.weight" in out


@pytest.mark.usefixtures("model")
def test_json_alone_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "print", "cli_model:build", "--cut", "2", "--json", "--args", '{"width": 32}')
    first, second = json.loads(out)["stages"]
    assert first["flops"]["forward"] == 2 * 4 * 32 * 16
    assert second["flops"]["backward_input"] == 2 * 4 * 16 * 4
    assert "graphs" not in first

    out, _ = run(capsys, "print", "cli_model:build", "--cut", "2", "--json", "--stage", "1", "--graph", "I")
    (stage,) = json.loads(out)["stages"]
    assert [row["operator"] for row in stage["graphs"]["backward_input"] if row["kind"] == "operation"] == [
        "aten.mse_loss_backward.default",
        "aten.mm.default",
    ]


def test_meta_gives_the_same_numbers_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    """On the GPT, whose attention and loss are other operators on the meta device."""
    arguments = ("print", "examples.gpt:build", "--stages", "2", "--json")
    size = {"width": 16, "depth": 2, "heads": 2, "length": 8}
    real, _ = run(capsys, *arguments, "--args", json.dumps(size))
    meta, _ = run(capsys, *arguments, "--args", json.dumps(size), "--meta")
    assert json.loads(real) == json.loads(meta)


@pytest.mark.usefixtures("model")
def test_meta_models_take_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    width = 2**40 // 4 // 16  # 1 TiB of parameters
    args = json.dumps({"width": width})
    out, _ = run(capsys, "print", "cli_model:build", "--cut", "2", "--json", "--meta", "--args", args)
    assert json.loads(out)["stages"][0]["flops"]["forward"] == 2 * 4 * 16 * width


def test_a_model_that_returns_its_loss(write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "cli_keywords",
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)\n"
        "    def forward(self, *, x):\n"
        "        return {'loss': self.b(self.a(x)).mean()}\n"
        "def example_batch(model):\n"
        "    return {'x': torch.zeros(2, 4)}, None\n",
    )
    out, _ = run(capsys, "print", "cli_keywords:Model", "--cut", "b")
    assert out.startswith("2 stages")


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("cli_model", [], "write MODULE:FACTORY"),
        ("cli_model:", [], "write MODULE:FACTORY"),
        ("cli_nothing:build", [], "Cannot import 'cli_nothing': ModuleNotFoundError: No module named 'cli_nothing'\n"),
        ("cli_model:nothing", [], "'cli_model' has no 'nothing'"),
        ("cli_model:number", [], "is a int, not a function"),
        ("cli_model:loss_fn", ["--args", '{"output": 1, "target": 2}'], "cli_model:loss_fn raised"),
        ("cli_model:Holder", [], "returned a Holder, not a torch.nn.Module"),
        ("cli_model:build", ["--args", '{"fail": true}'], "raised RuntimeError: no such size ("),
        ("cli_model:build", ["--args", '{"size": 1}'], "unexpected keyword argument 'size'"),
        ("cli_model:build", ["--args", "{"], "--args is no JSON"),
        ("cli_model:build", ["--args", "[1]"], "--args must be a JSON object"),
        ("cli_model:build", ["--schedule", "1f2b"], "unknown schedule '1f2b'"),
        ("cli_model:build", ["--schedule", "nothing.csv"], "cannot read the plan 'nothing.csv'"),
        ("cli_model:build", ["--stage", "2"], "the stages are 0 to 1"),
        ("cli_model:build", ["--stage", "1", "--graph", "x"], "There is no graph 'x'"),
        ("cli_model:build", ["--graph", "weight"], "needs a stage"),
    ],
)
def test_mistakes(target: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "print", target, "--stages", "2", *options)


@pytest.mark.usefixtures("model")
def test_a_cut_that_is_no_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No operation of a module 'layer2' ran" in refused(capsys, "print", "cli_model:build", "--cut", "layer2")


BATCHES: list[tuple[str, str]] = [
    ("", "Module 'cli_broken' has no example_batch: define example_batch(model) -> (arguments, target)"),
    ("def example_batch(model): return torch.zeros(4, 8)", "must return (arguments, target)"),
    ("def example_batch(model): return torch.zeros(4, 8), None", "must return (arguments, target)"),
    ("def example_batch(model): return (torch.zeros(4, 8),), 1", "the module has no loss_fn"),
    ("def example_batch(model): return (torch.zeros(4, 8),), None", "no scalar loss"),
    ("def example_batch(model): return 1 // 0", "cli_broken:example_batch raised ZeroDivisionError"),
    ("def build(:", "Cannot import 'cli_broken': SyntaxError"),
    ("import cli_missing", "Cannot import 'cli_broken': ModuleNotFoundError: No module named 'cli_missing'"),
]


@pytest.mark.parametrize(("text", "message"), BATCHES)
def test_what_a_module_must_offer(
    text: str, message: str, write: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write("cli_broken", f"import torch\ndef build(): return torch.nn.Linear(8, 2)\n{text}\n")
    assert message in refused(capsys, "print", "cli_broken:build", "--stages", "1")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["print"],
        ["print", "a:b"],
        ["print", "a:b", "--stages", "x"],
        ["print", "a:b", "--stages", "2", "--cut", "c"],
    ],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("usage: twobp")


def test_help_says_what_a_module_must_offer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["print", "--help"])
    assert exit_.value.code == 0
    assert "example_batch(model)" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"twobp-fx 0.1.0 (torch {torch.__version__})\n"


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "plan", "1f1b-1", "--ranks", "4")
    assert "makespan 15, longest rank 15, bubble 20.0%" in out  # 4N - 1 and (N - 1) / (4N - 1)
    out, _ = run(capsys, "plan", "1f1b", "--ranks", "4", "--microbatches", "4", "--unsplit")
    assert "makespan 21, longest rank 21, bubble 42.9%" in out  # 3 (2N - 1) and (N - 1) / (2N - 1)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_plan_of_every_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "plan", name, "--ranks", "3")
    assert f"Plan '{name}': 3 ranks" in out


def test_plan_with_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "plan", "interleaved-1f1b", "--ranks", "4", "--microbatches", "8", "--chunks", "4", "--unsplit")
    assert "4 ranks, 16 stages" in out
    assert "makespan 105, longest rank 105" in out  # 26.25 whole stages, in quarters


def test_plan_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    """arXiv 2401.10241's measured times: ZB-H1's bubble is 0.159 on 8 ranks with 24 micro-batches."""
    argv = ["zb-h1", "--ranks", "8", "--microbatches", "24", "--times", "18.522", "18.086", "9.337", "--comm", "0.601"]
    out, _ = run(capsys, "plan", *argv)
    assert "bubble 15.9%" in out
    assert "A column is" in out


@pytest.mark.parametrize("options", [{}, {"microbatches": 8}, {"microbatches": 8, "split_backward": False}])
def test_plan_csv(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--microbatches", "8"] if "microbatches" in options else []
    argv += ["--unsplit"] if "split_backward" in options else []
    out, _ = run(capsys, "plan", "1f1b", "--ranks", "4", "--csv", *argv)
    assert Plan.from_csv(out, name="1f1b") == build("1f1b", ranks=4, **options)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing", "--ranks", "2"], "unknown schedule 'nothing'"),
        (["1f1b", "--ranks", "0"], "ranks is 0"),
        (["1f1b", "--ranks", "2", "--microbatches", "-1"], "microbatches is -1"),
        (["zb-v", "--ranks", "2", "--chunks", "3"], "holds 2 stages a rank, not 3"),
        (["zb-v", "--ranks", "2", "--unsplit"], "is always split"),
        (["zb-v", "--ranks", "2", "--comm", "1"], "--comm has no unit without --times"),
        (["zb-v", "--ranks", "2", "--times", "1", "-1", "1"], "Costs.backward_input is -1.0"),
    ],
)
def test_plan_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "plan", *argv)


def test_as_a_program(tmp_path: Path) -> None:
    """`python -m twobp_fx` in a directory of the user's, with a pipe that closes early."""
    (tmp_path / "cli_model.py").write_text(MODEL)
    command = [sys.executable, "-m", "twobp_fx", "print", "cli_model:build", "--cut", "2", "--json", "--stage", "1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
