"""Plans: which actions each rank runs, and in which order. As values, and as torch's compute-only CSV."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import PlanError
from .actions import Action, ActionKind

__all__ = ["MAX_ACTIONS", "MAX_CSV_BYTES", "Plan", "load", "rank_text"]

MAX_CSV_BYTES = 16 * 2**20
"""The largest CSV that is read. 64 ranks with 1024 micro-batches take about 1.5 MB."""

MAX_ACTIONS = 4_000_000
"""The most actions that a plan may hold."""


@dataclass(frozen=True)
class Plan:
    """`ranks[r]` holds rank r's actions in the order it runs them. A rank may hold several stages, or all of them.

    Construction checks the types and that there is any action at all; `validate` checks that the plan can run.
    Raises PlanError.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(row) for row in self.ranks))
        for rank, row in enumerate(self.ranks):
            for position, action in enumerate(row):
                if not isinstance(action, Action):
                    raise PlanError(f"ranks[{rank}][{position}] is {action!r}, not an Action; see Action.parse")
        count = sum(map(len, self.ranks))
        if not count:
            raise PlanError(f"plan {self.name!r} holds no action")
        if count > MAX_ACTIONS:
            raise PlanError(f"plan {self.name!r} holds {count} actions, more than {MAX_ACTIONS}; use fewer")

    @cached_property
    def stages(self) -> int:
        """How many stages: one more than the largest number."""
        return 1 + max(action.stage for row in self.ranks for action in row)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches: one more than the largest number."""
        return 1 + max(action.microbatch for row in self.ranks for action in row)

    @cached_property
    def split(self) -> bool:
        """Whether any backward is split in I and W."""
        return any(action.kind in (ActionKind.I, ActionKind.W) for row in self.ranks for action in row)

    @cached_property
    def _kinds(self) -> dict[int, frozenset[ActionKind]]:
        kinds: dict[int, set[ActionKind]] = {}
        for row in self.ranks:
            for action in row:
                kinds.setdefault(action.stage, set()).add(action.kind)
        return {stage: frozenset(found) for stage, found in kinds.items()}

    @cached_property
    def _rank_of_stage(self) -> dict[int, int]:
        homes: dict[int, int] = {}
        for rank, row in enumerate(self.ranks):
            for action in row:
                homes.setdefault(action.stage, rank)
        return homes

    def kinds(self, stage: int) -> frozenset[ActionKind]:
        """The kinds of action that `stage` runs. Raises PlanError if the plan has no such stage."""
        self.rank_of_stage(stage)
        return self._kinds[stage]

    def rank_of_stage(self, stage: int) -> int:
        """The rank that runs `stage`. Raises PlanError if the plan has no such stage."""
        try:
            return self._rank_of_stage[stage]
        except KeyError:
            raise PlanError(f"plan {self.name!r} has no stage {stage}; its stages are 0 to {self.stages - 1}") from None

    def to_csv(self) -> str:
        """The plan in torch's compute-only format: one row a rank, one cell an action, no header.

        Byte for byte what torch writes for the same actions, its line ends (CR LF) included: write it to a file without
        translating them, as in `open(path, "w", newline="")`.
        """
        return "".join(",".join(map(str, row)) + "\r\n" for row in self.ranks)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> Plan:
        """The plan that `text` holds in torch's compute-only format; empty cells, torch's bubbles, are skipped.

        Does not check that the plan can run: see `validate`. Raises PlanError, with rank, line and column, for a
        cell that is no action, and for a text of more than MAX_CSV_BYTES characters.
        """
        if len(text) > MAX_CSV_BYTES:
            raise PlanError(f"plan {name!r}: the CSV is larger than {MAX_CSV_BYTES} bytes; is it a plan?")
        rows: list[tuple[Action, ...]] = []
        try:
            for number, cells in enumerate(csv.reader(io.StringIO(text, newline="")), start=1):
                rows.append(_parse_row(cells, number, name))
        except csv.Error as error:
            raise PlanError(f"plan {name!r}, line {len(rows) + 1}: not a CSV: {error}") from error
        while rows and not rows[-1]:  # blank lines at the end of a file are no ranks
            rows.pop()
        return cls(name, tuple(rows))


def rank_text(rank: int) -> str:
    """How messages name a rank: with the line that it is in a CSV, which counts from 1."""
    return f"rank {rank} (line {rank + 1})"


def load(path: str | os.PathLike[str], *, name: str | None = None) -> Plan:
    """The plan in the compute-only CSV at `path`, named after the file unless `name` is given.

    The file is only parsed, nothing in it is executed. Raises PlanError if it cannot be read, is larger than
    MAX_CSV_BYTES, or holds a malformed cell. `validate` then says whether the plan can run.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CSV_BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {error.strerror}") from error
    name = name or Path(path).stem
    if len(content) > MAX_CSV_BYTES:
        raise PlanError(f"plan {name!r}: the CSV is larger than {MAX_CSV_BYTES} bytes; is it a plan?")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"plan {name!r}: {os.fspath(path)!r} is not a text file") from error
    return Plan.from_csv(text, name=name)


def _parse_row(cells: list[str], row: int, name: str) -> tuple[Action, ...]:
    actions = []
    for column, cell in enumerate(cells, start=1):
        if stripped := cell.strip():
            try:
                actions.append(Action.parse(stripped))
            except PlanError as error:
                raise PlanError(f"plan {name!r}, {rank_text(row - 1)}, column {column}: {error}") from None
    return tuple(actions)
