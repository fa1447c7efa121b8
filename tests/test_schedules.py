"""The plans that `build` makes, and the action and CSV text they are kept in."""

import ast
import sys
from pathlib import Path

import pytest

from twobp_fx import schedules
from twobp_fx.errors import PlanError, TwobpError
from twobp_fx.schedules import SCHEDULES, Action, ActionKind, Plan, build, load, validate
from twobp_fx.schedules.plan import MAX_CSV_BYTES

FORMS = [(name, split) for name, schedule in SCHEDULES.items() for split in (True, False) if split or not schedule.always_split]


def rows(plan: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in plan.ranks]


class TestAction:
    @pytest.mark.parametrize("text", ["2F0", "1I3", "0W2", "3B1", "63F1023", "999999W999999"])
    def test_text_round_trip(self, text):
        assert str(Action.parse(text)) == text

    def test_parse(self):
        assert Action.parse("12I34") == Action(12, ActionKind.I, 34)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            "F0",
            "2F",
            "2X0",
            "2f0",
            "2F0 ",
            " 2F0",
            "2F0\n",
            "2F-1",
            "02F0",
            "2F00",
            "1000000F0",
            "٢F0",
            "2F0F1",
        ],
    )
    def test_other_text_is_refused(self, text):
        with pytest.raises(PlanError, match="such as 2F0"):
            Action.parse(text)

    @pytest.mark.parametrize("text", ["1SEND_F0", "1RECV_F0", "1SEND_B0", "1RECV_B0", "1UNSHARD", "1RESHARD", "1REDUCE_GRAD"])
    def test_other_torch_actions_are_refused(self, text):
        with pytest.raises(PlanError, match="compute-only plan is expected"):
            Action.parse(text)

    def test_overlapped_pair_is_refused(self):
        with pytest.raises(PlanError, match="one after the other"):
            Action.parse("(0F1;3B0)OVERLAP_F_B")

    def test_a_long_text_is_not_echoed_whole(self):
        with pytest.raises(PlanError) as caught:
            Action.parse("9" * 100_000)
        assert len(str(caught.value)) < 300

    @pytest.mark.parametrize(("stage", "microbatch"), [(-1, 0), (0, -1), (1_000_000, 0), (0, 1_000_000)])
    def test_numbers_out_of_bounds(self, stage, microbatch):
        with pytest.raises(PlanError, match="from 0 to 999999"):
            Action(stage, ActionKind.F, microbatch)

    def test_kind_must_be_a_kind(self):
        with pytest.raises(PlanError, match="ActionKind"):
            Action(0, "F", 0)

    def test_is_an_ordered_value(self):
        assert sorted([Action.parse("1F0"), Action.parse("0F2"), Action.parse("0F1")])[0] == Action.parse("0F1")
        assert len({Action.parse("0F1"), Action.parse("0F1")}) == 1
        with pytest.raises(AttributeError):
            Action.parse("0F1").stage = 3


class TestOrders:
    """The op order that arXiv 2405.18047 publishes, written out."""

    def test_naive(self):
        assert rows(build("naive", ranks=2)) == ["0F0 0I0 0W0", "1F0 1I0 1W0"]
        assert rows(build("naive", ranks=1, microbatches=2)) == ["0F0 0I0 0F1 0I1 0W0 0W1"]
        assert rows(build("naive", ranks=1, microbatches=2, split_backward=False)) == ["0F0 0B0 0F1 0B1"]

    def test_gpipe(self):
        assert rows(build("gpipe", ranks=2)) == ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1F1 1I0 1I1 1W0 1W1"]
        assert rows(build("gpipe", ranks=2, split_backward=False)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]

    def test_one_f_one_b(self):
        assert rows(build("1f1b", ranks=3, microbatches=4)) == [
            "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3",
            "1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3",
            "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3",
        ]

    def test_one_f_one_b_unsplit(self):
        assert rows(build("1f1b", ranks=3, microbatches=4, split_backward=False)) == [
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ]

    def test_fewer_microbatches_than_ranks(self):
        assert rows(build("1f1b", ranks=3, microbatches=1)) == ["0F0 0I0 0W0", "1F0 1I0 1W0", "2F0 2I0 2W0"]


class TestBuild:
    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
    def test_every_plan_is_valid(self, name, split):
        for ranks in (1, 2, 3, 4, 5, 8, 13):
            for microbatches in (1, 2, 3, 4, 5, 7, 8, 13, 16, 27):
                plan = build(name, ranks=ranks, microbatches=microbatches, split_backward=split)
                validate(plan)
                assert (plan.name, plan.stages, plan.microbatches) == (name, ranks, microbatches)
                assert plan.split is split

    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize(("name", "microbatches"), [("naive", 1), ("gpipe", 6), ("1f1b", 6), ("1f1b-1", 6), ("1f1b-2", 12)])
    def test_default_microbatches(self, name, microbatches, split):
        plan = build(name, ranks=6, split_backward=split)
        validate(plan)
        assert plan.name == name
        assert plan.microbatches == microbatches
        assert plan == build(name, ranks=6, microbatches=microbatches, chunks=1, split_backward=split)

    def test_the_catalog_is_explicit_and_fixed(self):
        assert list(SCHEDULES) == [
            *("naive", "gpipe", "1f1b", "1f1b-1", "1f1b-2", "interleaved-1f1b"),
            *("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v", "auto"),
        ]
        with pytest.raises(TypeError):
            SCHEDULES["mine"] = SCHEDULES["naive"]

    def test_unknown_name(self):
        with pytest.raises(PlanError, match=r"unknown schedule '1f1b1'; did you mean '1f1b-1'\? .*naive, gpipe, 1f1b, "):
            build("1f1b1", ranks=4)
        with pytest.raises(PlanError, match=r"unknown schedule 'zzz'\. The known schedules are naive"):
            build("zzz", ranks=4)

    @pytest.mark.parametrize(("name", "right"), [("1f1b-1", 4), ("1f1b-2", 8)])
    def test_fixed_microbatches(self, name, right):
        with pytest.raises(PlanError, match=f"runs {right} micro-batches, not 6; use '1f1b' for any number"):
            build(name, ranks=4, microbatches=6)

    @pytest.mark.parametrize("chunks", [0, 2])
    def test_chunks_are_refused(self, chunks):
        with pytest.raises(PlanError, match="one stage a rank"):
            build("1f1b", ranks=4, chunks=chunks)

    @pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
    def test_counts_must_be_positive_integers(self, value):
        with pytest.raises(PlanError, match=r"ranks is .* at least 1"):
            build("1f1b", ranks=value)
        with pytest.raises(PlanError, match=r"microbatches is .* at least 1"):
            build("1f1b", ranks=4, microbatches=value)

    def test_huge_plans_are_refused_before_they_are_made(self):
        with pytest.raises(PlanError, match="use fewer"):
            build("1f1b", ranks=10**6, microbatches=10**6)


class TestPlan:
    def test_properties(self):
        plan = Plan.from_csv("0F0,3F0,3B0,0I0,0W0\n1F0,2F0,2B0,1B0\n")
        assert plan.stages == 4
        assert plan.microbatches == 1
        assert plan.split
        assert [plan.rank_of_stage(stage) for stage in range(4)] == [0, 1, 1, 0]
        assert plan.kinds(0) == {ActionKind.F, ActionKind.I, ActionKind.W}
        assert plan.kinds(3) == {ActionKind.F, ActionKind.B}

    @pytest.mark.parametrize("stage", [-1, 2])
    def test_no_such_stage(self, stage):
        plan = build("naive", ranks=2)
        for ask in (plan.rank_of_stage, plan.kinds):
            with pytest.raises(PlanError, match=f"no stage {stage}; its stages are 0 to 1"):
                ask(stage)

    def test_is_a_value(self):
        plan = Plan("p", [[Action.parse("0F0"), Action.parse("0B0")]])
        assert plan == Plan("p", ((Action.parse("0F0"), Action.parse("0B0")),))
        assert len({plan, plan}) == 1
        with pytest.raises(AttributeError):
            plan.name = "q"

    def test_holds_actions_only(self):
        with pytest.raises(PlanError, match=r"ranks\[1\]\[0\] is '1F0', not an Action"):
            Plan("p", ((Action.parse("0F0"),), ("1F0",)))

    @pytest.mark.parametrize("ranks", [(), ((), ())])
    def test_is_not_empty(self, ranks):
        with pytest.raises(PlanError, match="holds no action"):
            Plan("p", ranks)


class TestCsv:
    @pytest.mark.parametrize(("name", "split"), FORMS)
    def test_round_trip(self, name, split, tmp_path):
        plan = build(name, ranks=4, split_backward=split)
        assert Plan.from_csv(plan.to_csv(), name=name) == plan
        path = tmp_path / f"{name}.csv"
        path.write_bytes(plan.to_csv().encode())
        assert load(path) == plan
        assert load(str(path), name="mine").name == "mine"

    def test_text(self):
        assert build("naive", ranks=2).to_csv() == "0F0,0I0,0W0\r\n1F0,1I0,1W0\r\n"

    def test_what_other_writers_add_is_skipped(self, tmp_path):
        plan = Plan.from_csv('0F0,,0I0, 0W0 ,,\n,"1F0",1I0,,1W0\r\n\n\n', name="naive")
        assert plan == build("naive", ranks=2)
        (tmp_path / "naive.csv").write_bytes(b"\xef\xbb\xbf" + plan.to_csv().encode())
        assert load(tmp_path / "naive.csv") == plan

    def test_a_blank_line_in_the_middle_is_a_rank(self):
        plan = Plan.from_csv("0F0,0B0\n\n1F0,1B0\n")
        assert len(plan.ranks) == 3
        with pytest.raises(PlanError, match=r"rank 1 \(line 2\) has no action"):
            validate(plan)

    @pytest.mark.parametrize("cell", ["1X0", "__import__('os')", "=1+1", "1SEND_F0"])
    def test_malformed_cell(self, cell):
        with pytest.raises(PlanError, match=r"plan 'p', rank 1 \(line 2\), column 3: "):
            Plan.from_csv(f"0F0,0B0\n1F0,,{cell}\n", name="p")

    @pytest.mark.parametrize("text", ["", "\n", ",,\n,,\n"])
    def test_empty(self, text):
        with pytest.raises(PlanError, match="holds no action"):
            Plan.from_csv(text)

    def test_not_a_csv(self):
        with pytest.raises(PlanError, match="line 2: not a CSV"):
            Plan.from_csv("0F0,0B0\n" + "x" * 200_000)

    def test_too_large(self, tmp_path):
        with pytest.raises(PlanError, match="larger than"):
            Plan.from_csv("," * (MAX_CSV_BYTES + 1))
        with open(tmp_path / "large.csv", "wb") as file:
            file.truncate(MAX_CSV_BYTES + 1)
        with pytest.raises(PlanError, match="larger than"):
            load(tmp_path / "large.csv")

    def test_unreadable(self, tmp_path):
        with pytest.raises(PlanError, match=r"cannot read the plan .*missing\.csv'"):
            load(tmp_path / "missing.csv")
        with pytest.raises(PlanError, match="cannot read the plan"):
            load(tmp_path)
        (tmp_path / "binary.csv").write_bytes(b"\x80\xff")
        with pytest.raises(PlanError, match="not a text file"):
            load(tmp_path / "binary.csv")


def test_errors_are_ours_and_value_errors():
    assert issubclass(PlanError, TwobpError)
    assert issubclass(PlanError, ValueError)


def test_planning_needs_no_torch():
    """Planning imports the standard library and the errors, and its exact solver if there is one: nothing else."""
    folder = Path(schedules.__file__).parent
    files = list(folder.rglob("*.py"))
    assert len(files) > len(list(folder.glob("*.py")))
    for file in files:
        allowed = sys.stdlib_module_names | ({"ortools"} if file.name == "exact.py" else set())
        outside = len(file.relative_to(folder).parts) + 1  # dots that lead out of the folder
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in allowed for alias in node.names), file
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, file
            elif isinstance(node, ast.ImportFrom) and node.level >= outside:
                assert node.module == "errors", file
