"""Which rank runs which stage.

    one chunk   stage s on rank s
    looped      stage s on rank s mod p: every rank holds v stages, p apart (arXiv 2104.04473)
    V           down the ranks and back up: stages s and 2p - 1 - s on rank s, so that the first and the last stage share
                a rank (arXiv 2401.10241)

Placed on 4 ranks:

    rank   one chunk   looped, v = 2   V
    0      0           0 4             0 7
    1      1           1 5             1 6
    2      2           2 6             2 5
    3      3           3 7             3 4
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Placement", "looped", "one_chunk", "v_shape"]


@dataclass(frozen=True, slots=True)
class Placement:
    """`rank_of_stage[s]` is the rank that runs stage s. Every rank runs as many stages."""

    rank_of_stage: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return 1 + max(self.rank_of_stage)

    @property
    def stages(self) -> int:
        """How many stages, over all ranks."""
        return len(self.rank_of_stage)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in the order in which the forward passes through them."""
        return tuple(stage for stage, home in enumerate(self.rank_of_stage) if home == rank)


def one_chunk(ranks: int) -> Placement:
    """One stage a rank."""
    return Placement(tuple(range(ranks)))


def looped(ranks: int, chunks: int) -> Placement:
    """`chunks` stages a rank: the forward goes down all the ranks, and starts again at the first."""
    return Placement(tuple(range(ranks)) * chunks)


def v_shape(ranks: int) -> Placement:
    """Two stages a rank: the forward goes down all the ranks, and comes back up."""
    return Placement((*range(ranks), *reversed(range(ranks))))
