"""DualPipeV: DeepSeek's DualPipe (arXiv 2412.19437) on half of the ranks, with each parameter there once.

From the published steps (github.com/deepseek-ai/DualPipe, dualpipev.py); B is the full backward there, too, and what it
calls a backward with zero bubble is our I. What it runs as an overlapped pair, F & B, is written one after the other, F
first: a plan is one order a rank, and actions do not overlap on a rank.
"""

from __future__ import annotations

from collections import deque

from .actions import Action, ActionKind
from .placement import v_shape
from .plan import Plan

__all__ = ["dualpipe_v"]


def dualpipe_v(ranks: int, microbatches: int) -> Plan:
    """Two stages a rank, placed in a V; at least twice as many micro-batches as ranks.

    Upper case is the rank's first stage, lower case its second; `w` stands for the oldest W that is left, of either
    stage. Rank r of p, m micro-batches:

        1  2 (p - r - 1) times  F
        2  r + 1 times          F f
        3  p - r - 1 times      i w f
        4  m - 2p + r + 1 times F b f B
        5  p - r - 1 times      b f B
        6  r + 1 times          b B; in the second half i I in place of them, and their W later
        7  p - r - 1 times      w I
        8  r + 1 times          w

    Whole B in the middle, where no rank has a gap to fill; I and W apart at both ends.
    """
    rows = []
    for rank in range(ranks):
        row = _Row(v_shape(ranks).stages_of_rank(rank))
        behind = ranks - 1 - rank
        row.run("F" * (2 * behind))
        row.run("Ff" * (rank + 1))
        row.run("iwf" * behind)
        row.run("FbfB" * (microbatches - 2 * ranks + rank + 1))
        row.run("bfB" * behind)
        ends = "bB" * (rank + 1)
        whole = rank + 1  # half of them
        row.run(ends[:whole] + ends[whole:].replace("b", "i").replace("B", "I"))
        row.run("wI" * behind)
        row.run("w" * (rank + 1))
        rows.append(tuple(row.actions))
    return Plan("dualpipe-v", tuple(rows))


class _Row:
    """A rank's actions as they are added; micro-batches count up by stage and direction."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._pending: deque[Action] = deque()

    def run(self, letters: str) -> None:
        for letter in letters:
            if letter == "w":
                self.actions.append(self._pending.popleft())
                continue
            chunk, kind = int(letter.islower()), ActionKind(letter.upper())
            count = self._forwards if kind == ActionKind.F else self._backwards
            self.actions.append(Action(self._stages[chunk], kind, count[chunk]))
            if kind == ActionKind.I:
                self._pending.append(Action(self._stages[chunk], ActionKind.W, count[chunk]))
            count[chunk] += 1
