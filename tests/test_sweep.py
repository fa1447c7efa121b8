"""The kept table of the sweep over PyTorch's own test databases: nothing in it is wrong, and a part of it comes out the same."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("sweep.csv")
EVERY = 10


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_nothing_is_wrong():
    table = rows(TABLE)
    assert len(table) > 600
    assert not [row["name"] for row in table if row["outcome"] == "wrong"]


def test_what_is_neither_right_nor_refused_fails_without_us_too():
    assert not [row["name"] for row in rows(TABLE) if row["outcome"] == "error" and row["aot_eager"] != "error"]


def test_every_refusal_has_a_reason():
    assert not [row["name"] for row in rows(TABLE) if row["outcome"] == "refused" and not row["reason"]]


def test_a_part_comes_out_as_kept(tmp_path):
    # In a process of its own: torch's test databases change global settings when they are imported.
    table = tmp_path / "sweep.csv"
    command = [sys.executable, "-m", "tests.sweep", "--jobs", "1", "--every", str(EVERY), "--table", str(table)]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True, timeout=600, capture_output=True)
    assert rows(table) == rows(TABLE)[::EVERY]
