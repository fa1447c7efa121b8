"""What print_split and describe_split say, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import twobp_fx
from examples import gpt
from twobp_fx.inspect import describe_split, print_plan, print_split
from twobp_fx.inspect.describe import EarlyGradient, early_gradients
from twobp_fx.inspect.text import bytes_text, count_text
from twobp_fx.program import Role, Signature, Value
from twobp_fx.schedules import SCHEDULES, Action, Costs, Plan, build, simulate

BATCH = 4
LAYER_NORM = "aten.native_layer_norm_backward.default"
BATCH_NORM = "aten.native_batch_norm_backward.default"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pipe_of(model: nn.Module, stages: Any, x: Tensor, target: Tensor, **options: Any) -> twobp_fx.Pipe:
    return twobp_fx.compile(
        model,
        stages,
        loss_fn=options.pop("loss_fn", F.mse_loss),
        example_args=(x,),
        example_kwargs={"target": target},
        compiler="eager",
        **options,
    )


@pytest.fixture(scope="module")
def mlp() -> twobp_fx.Pipe:
    """Stage 0: Linear(8, 16), ReLU. Stage 1: Linear(16, 4), mean squared error. Four rows a micro-batch."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return pipe_of(model, ["2"], torch.zeros(BATCH, 8), torch.zeros(BATCH, 4), microbatches=6, schedule="1f1b")


@pytest.fixture(scope="module")
def transformer() -> twobp_fx.Pipe:
    model = gpt.build(width=16, depth=2, heads=2, length=8)
    (x,), target = gpt.example_batch(model)
    return pipe_of(model, ["blocks.1"], x, target, loss_fn=gpt.loss_fn)


def printed(pipe: twobp_fx.Pipe, **options: Any) -> str:
    file = io.StringIO()
    print_split(pipe, file=file, **options)
    return file.getvalue()


def table(text: str, first_header: str) -> list[dict[str, str]]:
    """The rows of the table whose header line begins so, as dictionaries, by the columns that its rule marks."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first_header))
    spans = [match.span() for match in re.finditer("-+", lines[start + 1])]
    headers = [lines[start][a:b].strip() for a, b in spans]
    rows = []
    for line in lines[start + 2 :]:
        if not line.strip():
            break
        if set(line) - {"-", " "}:
            rows.append({header: line[a:b].strip() for header, (a, b) in zip(headers, spans, strict=True)})
    return rows


def test_flops_of_an_mlp_are_those_worked_out_by_hand(mlp: twobp_fx.Pipe) -> None:
    first, second = (stage["flops"] for stage in describe_split(mlp)["stages"])
    layer = 2 * BATCH * 8 * 16
    assert first == {"forward": layer, "backward_input": 0, "backward_weight": layer, "backward": layer}
    layer = 2 * BATCH * 16 * 4
    assert second == {"forward": layer, "backward_input": layer, "backward_weight": layer, "backward": 2 * layer}


def test_bytes_of_an_mlp_are_those_worked_out_by_hand(mlp: twobp_fx.Pipe) -> None:
    first, second = describe_split(mlp)["stages"]
    f32 = 4
    x, hidden, out, target = (f32 * BATCH * n for n in (8, 16, 4, 4))

    assert first["sent"] == hidden
    assert first["saved"] == x + hidden  # of relu, its output
    assert first["freed_after_input"] == 0  # there is no I
    assert first["held_for_weight"] == x + hidden + hidden  # and the gradient that came in

    assert second["sent"] == 0
    assert second["saved"] == hidden + out + target
    assert second["freed_after_input"] == out + target  # the loss's gradient needs these
    assert second["held_for_weight"] == hidden + out  # the layer's input, and the gradient of its output


def test_nodes_of_an_mlp(mlp: twobp_fx.Pipe) -> None:
    first, second = (stage["nodes"] for stage in describe_split(mlp)["stages"])
    assert first["backward_input"] == 0
    assert first["backward_weight"] == first["backward"]
    assert second["backward_input"] == 2  # mse_loss_backward, mm
    assert second["backward"] == second["backward_input"] + second["backward_weight"]


def test_describe_split_is_plain_json_with_totals(mlp: twobp_fx.Pipe) -> None:
    described = describe_split(mlp, graphs=True)
    assert json.loads(json.dumps(described)) == described
    assert described["plan"] == {"name": "1f1b", "ranks": 2, "microbatches": 6}
    assert [stage["index"] for stage in described["stages"]] == [0, 1]
    assert described["stages"][0]["modules"] == "modules '0' to '1'"
    for key in ("saved", "freed_after_input", "held_for_weight", "sent"):
        assert described["total"][key] == sum(stage[key] for stage in described["stages"])
    for key in ("nodes", "flops"):
        for graph, number in described["total"][key].items():
            assert number == sum(stage[key][graph] for stage in described["stages"])
    assert "graphs" not in describe_split(mlp)["stages"][0]


def test_describe_one_stage(mlp: twobp_fx.Pipe) -> None:
    described = describe_split(mlp, stage=1, graph="weight")
    (stage,) = described["stages"]
    assert stage["index"] == 1
    assert list(stage["graphs"]) == ["backward_weight"]
    assert described["total"] == describe_split(mlp)["total"]


def test_the_graphs_of_one_stage_node_by_node(mlp: twobp_fx.Pipe) -> None:
    (stage,) = describe_split(mlp, stage=1)["stages"]
    graphs = {name: {row["kind"]: [] for row in rows} for name, rows in stage["graphs"].items()}
    for name, rows in stage["graphs"].items():
        for row in rows:
            graphs[name][row["kind"]].append(row)

    taken = [(row["role"], row["key"]) for row in graphs["forward"]["placeholder"]]
    sent = mlp.stages[0].sends[0]
    assert taken == [("parameter", "2.weight"), ("parameter", "2.bias"), ("input", "1"), ("received", sent)]
    assert {tuple(row["where"]) for row in graphs["forward"]["operation"]} == {("F",)}

    first, second = graphs["backward_input"]["operation"]
    assert first["operator"] == "aten.mse_loss_backward.default"
    assert (first["where"], first["stashed"]) == (["I"], True)
    assert second["operator"] == "aten.mm.default"
    assert (second["where"], second["stashed"], second["module"]) == (["I"], False, "2")
    assert second["tensors"] == [{"shape": [BATCH, 16], "dtype": "float32"}]
    assert second["source"].split(":")[0].endswith("linear.py")
    assert second["arguments"].startswith(first["name"] + ", ")

    given = [(row["role"], row["stashed"], row["where"]) for row in graphs["backward_input"]["output"]]
    assert given == [("received gradient", False, ["I"]), ("stash", True, ["I"])]
    given = [(row["role"], row["key"]) for row in graphs["backward_weight"]["output"]]
    assert given == [("parameter gradient", "2.weight"), ("parameter gradient", "2.bias")]

    halves = {row["name"]: row["where"] for row in graphs["backward"]["operation"]}
    assert halves == {
        row["name"]: row["where"] for name in ("backward_input", "backward_weight") for row in graphs[name]["operation"]
    }
    reads = {row["role"]: row["where"] for row in graphs["backward"]["placeholder"]}
    assert reads["received"] == ["W"]
    assert reads["tangent"] == ["I"]


def test_a_recomputed_node_says_so(transformer: twobp_fx.Pipe) -> None:
    forward = {node.name for node in transformer.stages[1].graphs.forward.graph.nodes if node.op == "call_function"}
    rows = describe_split(transformer, stage=1, graph="B")["stages"][0]["graphs"]["backward"]
    recomputed = {row["name"] for row in rows if row["recomputed"]}
    assert recomputed
    assert recomputed == {row["name"] for row in rows if row["kind"] == "operation"} & forward
    shown = [row for row in table(printed(transformer, stage=1, graph="B"), "op") if "recomputed" in row["where"]]
    assert len(shown) == len(recomputed)


def test_overview(mlp: twobp_fx.Pipe) -> None:
    text = printed(mlp)
    assert text.startswith("2 stages, plan '1f1b': 2 ranks, 6 micro-batches.")
    first, second, every = table(text, "stage  modules")
    assert first["modules"] == "'0' to '1'"
    assert [first[f"{x} FLOPs"] for x in "FIWB"] == ["1.02 k", "0", "1.02 k", "1.02 k"]
    assert [second[f"{x} FLOPs"] for x in "FIWB"] == ["512", "512", "512", "1.02 k"]
    assert every["stage"] == "all"
    assert every["F FLOPs"] == "1.54 k"
    memory = table(text, "stage    saved by F")
    assert [row["saved by F"] for row in memory] == ["384 B", "384 B", "768 B"]
    assert [row["held for W (stash included)"] for row in memory] == ["640 B", "320 B", "960 B"]
    assert [row["sent to next stage"] for row in memory] == ["256 B", "0 B", "256 B"]
    assert "computed in I" not in text


def test_tables_stay_within_a_terminal(transformer: twobp_fx.Pipe) -> None:
    names = tuple("model.language_model.layers.31.self_attention.query_projection" for _ in range(2))
    program = transformer.stages[0]
    before = program.modules
    try:
        program.modules = f"modules '{names[0]}' to '{names[1]}'"
        texts = [printed(transformer), printed(transformer, stage=0), printed(transformer, stage=1)]
    finally:
        program.modules = before
    tables = [line for text in texts for line in text.splitlines() if not line.startswith("Stage 0:")]
    assert max(map(len, tables)) <= 130


def test_one_stage_prints_all_four_graphs_or_the_one_asked_for(mlp: twobp_fx.Pipe) -> None:
    text = printed(mlp, stage=1)
    for title in ("F, forward (", "I, backward-input", "W, backward-weight", "B, full backward"):
        assert title in text
    weight = printed(mlp, stage=1, graph="weight")
    assert "W, backward-weight" in weight
    assert "F, forward (" not in weight
    assert weight == printed(mlp, stage=1, graph="W") == printed(mlp, stage=1, graph="backward_weight")
    assert "I, backward-input: gradients for the stage before (0 operations)" in printed(mlp, stage=0)


def test_a_printed_graph(mlp: twobp_fx.Pipe) -> None:
    rows = table(printed(mlp, stage=1, graph="I"), "op")
    operation = next(row for row in rows if row["op"] == "mse_loss_backward")
    assert operation["value"] == "f32[4,4]"
    assert operation["where"] == "I, stashed"
    parameter = next(row for row in rows if row["op"] == "placeholder" and row["arguments, role"] == "tangent")
    assert parameter["value"] == "f32[]"
    assert [row["arguments, role"] for row in rows if row["op"] == "output"] == ["received gradient", "stash"]


class Norms(nn.Module):
    """Two layers and a norm; optionally a parameter added to the activations."""

    def __init__(self, norm: nn.Module, added: Tensor | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.norm = norm
        self.added = None if added is None else nn.Parameter(added)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.second(self.first(x)))
        return h if self.added is None else torch.tanh(h + self.added.view(BATCH, 6))


@pytest.mark.parametrize(("norm", "operator"), [(nn.LayerNorm(6), LAYER_NORM), (nn.BatchNorm1d(6), BATCH_NORM)])
def test_gradients_that_a_fused_operator_computes_in_i(norm: nn.Module, operator: str) -> None:
    pipe = pipe_of(Norms(norm), ["second"], torch.zeros(BATCH, 4), torch.zeros(BATCH, 6))
    assert early_gradients(pipe.stages[0]) == ()  # without I, everything runs in W
    expected = [EarlyGradient(f"norm.{name}", "fused operator", operator) for name in ("weight", "bias")]
    assert list(early_gradients(pipe.stages[1])) == expected
    described = describe_split(pipe)["stages"]
    assert described[0]["early_gradients"] == []
    assert described[1]["early_gradients"] == [dataclasses.asdict(gradient) for gradient in expected]
    assert f"    norm.weight  (fused operator {operator})\n" in printed(pipe, stage=1, graph="F")
    assert "Parameter gradients computed in I (stage 1: 2)." in printed(pipe)


@pytest.mark.parametrize("shape", [(BATCH, 6), (BATCH * 6,)], ids=["as it is", "as a view"])
def test_gradients_that_an_input_gradient_needs(shape: tuple[int, ...]) -> None:
    model = Norms(nn.Identity(), added=torch.zeros(shape))
    pipe = pipe_of(model, ["second"], torch.zeros(BATCH, 4), torch.zeros(BATCH, 6))
    assert early_gradients(pipe.stages[1]) == (EarlyGradient("added", "needed by an input gradient", None),)
    assert "    added  (needed by an input gradient)\n" in printed(pipe, stage=1)


def test_a_value_handed_on_counts_for_each_stage_that_sends_it() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(7, 5)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.a(x)
            out: Tensor = self.c(self.b(h))
            return out + h

    pipe = pipe_of(Skip(), ["b", "c"], torch.zeros(BATCH, 4), torch.zeros(BATCH, 5))
    sent = [stage["sent"] for stage in describe_split(pipe)["stages"]]
    assert sent == [4 * BATCH * 5, 4 * BATCH * (5 + 7), 0]


def test_a_tuple_value_lists_its_tensors(transformer: twobp_fx.Pipe) -> None:
    rows = describe_split(transformer, stage=1, graph="F")["stages"][0]["graphs"]["forward"]
    norm = next(row for row in rows if row["operator"] == "aten.native_layer_norm.default")
    assert [tensor["shape"] for tensor in norm["tensors"]] == [[4, 8, 16], [4, 8, 1], [4, 8, 1]]


@pytest.mark.parametrize("stage", [2, -1, True, "1"])
def test_an_unknown_stage_is_refused(mlp: twobp_fx.Pipe, stage: Any) -> None:
    for function in (print_split, describe_split):
        with pytest.raises(twobp_fx.InputError, match="the stages are 0 to 1"):
            function(mlp, stage=stage)


def test_an_unknown_graph_is_refused(mlp: twobp_fx.Pipe) -> None:
    with pytest.raises(twobp_fx.InputError, match=r"no graph 'wieght'.*'forward' \(F\).*'weight' \(W\)"):
        print_split(mlp, stage=0, graph="wieght")
    with pytest.raises(twobp_fx.InputError, match="needs a stage"):
        print_split(mlp, graph="weight")


def test_nothing_captured_yet() -> None:
    pipe = twobp_fx.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, loss_fn=F.mse_loss, compiler="eager")
    with pytest.raises(twobp_fx.InputError, match="Nothing has been captured"):
        print_split(pipe)


def test_print_split_prints_to_stdout(mlp: twobp_fx.Pipe, capsys: pytest.CaptureFixture[str]) -> None:
    twobp_fx.print_split(mlp)
    assert capsys.readouterr().out == printed(mlp)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_949, "1000 k"), (999_951, "1.00 M"), (33_554_432, "33.6 M")],
)
def test_counts(value: int, text: str) -> None:
    assert count_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**19, "1.50 MiB"), (5 * 2**90, "5368709120 EiB")],
)
def test_sizes(value: int, text: str) -> None:
    assert bytes_text(value) == text


def printed_plan(plan: Plan, costs: Costs | None = None) -> str:
    file = io.StringIO()
    print_plan(plan, costs, file=file)
    return file.getvalue()


def test_a_plan_on_a_time_axis() -> None:
    """Two ranks, two micro-batches, worked out by hand: 7 units, of which each rank works 6."""
    rows = table(printed_plan(build("1f1b", ranks=2, microbatches=2)), "rank")
    assert [row["actions"] for row in rows] == ["0F0 0F1 .   0I0 0W0 0I1 0W1", ".   1F0 1I0 1F1 1I1 1W0 1W1"]
    assert [(row["bubble"], row["peak"]) for row in rows] == [("14.3%", "2"), ("14.3%", "2")]


def test_an_unsplit_backward_takes_two_units() -> None:
    text = printed_plan(build("gpipe", ranks=2, microbatches=1, split_backward=False))
    assert [row["actions"] for row in table(text, "rank")] == ["0F0 .   .   .   0B0 ---", ".   1F0 1B0 --- .   ."]
    assert text.rstrip().endswith("makespan 6, longest rank 6, bubble 50.0%, peak 1 (micro-batches of a whole stage)")


def test_a_long_plan_is_folded() -> None:
    text = printed_plan(build("1f1b", ranks=2, microbatches=40))
    assert max(map(len, text.splitlines())) <= 120
    assert {f"{stage}{kind}{i}" for stage in "01" for kind in "FIW" for i in range(40)} <= set(text.split())


def test_a_plan_to_scale() -> None:
    """44 units in 88 columns. Rank 0: F 0-10, I 24-32, W 32-44; rank 1, after 2 on the way: F 12-16, I 16-22, W 22-23."""
    costs = Costs(forward=(10, 4), backward_input=(8, 6), backward_weight=(12, 1), comm=2)
    text = printed_plan(build("naive", ranks=2), costs)
    rows = table(text, "rank")
    drawn = ["0F0" + "-" * 17 + "." * 28 + "0I0" + "-" * 13 + "0W0" + "-" * 21]
    drawn.append("." * 24 + "1F0" + "-" * 5 + "1I0" + "-" * 9 + "W-" + "." * 42)
    assert [row["actions"] for row in rows] == drawn
    assert [(row["bubble"], row["peak"]) for row in rows] == [("31.8%", "1"), ("75.0%", "1")]
    assert text.startswith("Plan 'naive': 2 ranks, 2 stages, 1 micro-batch. A column is 0.5 of the costs' unit of time.")
    assert text.rstrip().endswith("makespan 44, longest rank 44, bubble 53.4%, peak 1 (micro-batches of a whole stage)")


def test_a_plan_to_scale_tells_a_ranks_stages_apart() -> None:
    rows = table(printed_plan(build("zb-v", ranks=2, microbatches=12), Costs()), "rank")
    assert {letter.upper() for row in rows for letter in row["actions"]} <= set("FIW.-")
    assert {"f", "F", "i", "I", "w", "W"} <= set(rows[0]["actions"])


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_plan_to_scale_is_bounded(name: str) -> None:
    """In width, and to one line a rank."""
    text = printed_plan(build(name, ranks=4), Costs(1.7, 1.3, 0.9, comm=0.3))
    assert max(map(len, text.splitlines())) <= 120
    assert [row["rank"] for row in table(text, "rank")] == ["0", "1", "2", "3"]


def test_a_plans_peak_in_bytes() -> None:
    costs = Costs(saved=2**20, held_for_weight=2**19)
    plan = build("zb-h1", ranks=2, microbatches=4)
    text = printed_plan(plan, costs)
    assert [row["peak"] for row in table(text, "rank")] == ["2.00 MiB", "1.50 MiB"]
    assert "peak 2.00 MiB\n" in text
    assert simulate(plan, costs).peak_memory == (2 * 2**20, 1.5 * 2**20)


def test_print_plan_is_public() -> None:
    assert twobp_fx.print_plan is print_plan


def test_a_plan_that_cannot_run_is_refused() -> None:
    with pytest.raises(twobp_fx.PlanError):
        print_plan(Plan("broken", ((Action.parse("0I0"),),)))


def test_a_gradient_that_an_effect_needs() -> None:
    """I checks a parameter's gradient, which no input gradient needs: the check keeps it in I."""
    graph = fx.Graph()
    g = graph.placeholder("g")
    summed = graph.call_function(torch.ops.aten.sum.dim_IntList, (g, [0]))
    graph.call_function(torch.ops.aten._assert_async.default, (summed,))
    graph.output((g, summed))
    weight = fx.Graph()
    stash = weight.placeholder(summed.name)
    weight.output((stash,))

    def value(name: str, role: Role) -> Value:
        return Value(name, role, name, (3,), (1,), torch.float32, torch.device("cpu"))

    program: Any = SimpleNamespace(
        graphs=SimpleNamespace(backward_input=fx.GraphModule({}, graph), backward_weight=fx.GraphModule({}, weight)),
        signatures={
            "backward_input": Signature((), (value("h", Role.RECEIVED_GRADIENT), value(summed.name, Role.STASH))),
            "backward_weight": Signature((), (value("bias", Role.PARAMETER_GRADIENT),)),
        },
    )
    assert early_gradients(program) == (EarlyGradient("bias", "needed by an operation with an effect", None),)
