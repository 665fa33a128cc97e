"""Rule S-18: a cache divided over the ranks of a context-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.attention import Answer, attend_visible
from paged_mla_reference.masks import visibility
from paged_mla_reference.rounding import Rounding
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem


@dataclass(frozen=True)
class ContextParallel:
    """How positions are dealt to ranks: `interleave` tokens each, round and round (S-18).

    Parameters
    ----------
    world : int
        Ranks, >= 1.
    interleave : int
        Consecutive tokens one rank gets, >= 1.
    """

    world: int
    interleave: int = 1

    def owner(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rank that caches each position, ``(p // interleave) % world``."""
        return (positions // self.interleave) % self.world

    def local_len(self, seq_len: int, rank: int) -> int:
        """Return how many of a row's `seq_len` tokens a rank caches, by formula.

        Whole rounds give every rank `interleave` tokens; what is left over is dealt from rank
        0 on. 0 is an ordinary answer: such a rank contributes ``(0, -inf)`` (S-6, S-8).
        """
        rounds, left = divmod(seq_len, self.world * self.interleave)
        mine = min(max(left - rank * self.interleave, 0), self.interleave)
        return rounds * self.interleave + mine

    def local_positions(self, seq_len: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's cached tokens, ascending, int64 [local_len]."""
        local = np.arange(self.local_len(seq_len, rank))
        rounds, inside = np.divmod(local, self.interleave)
        return (rounds * self.world + rank) * self.interleave + inside


def attend_rank(
    problem: Problem,
    batch: Batch,
    image: CacheImage,
    group: ContextParallel,
    rank: int,
    *,
    rounding: Rounding = Rounding.SPEC,
) -> Answer:
    """Attend every query to the keys one rank owns; merging all ranks gives the whole (S-18).

    Visibility is decided by global positions: the causal bound of a rank's keys is not the
    rank's local length.
    """
    visible = []
    for seen in visibility(problem, batch):
        mine = group.owner(np.arange(seen.shape[1])) == rank  # [S]
        visible.append(seen & mine)
    return attend_visible(problem, batch, image, visible, rounding)
