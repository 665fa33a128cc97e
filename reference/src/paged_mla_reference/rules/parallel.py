"""Rule S-18: a cache that is divided among the ranks of a context-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer, attend_visible
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import NO_SLOT, query_spans, slots_of
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem


@dataclass(frozen=True)
class ContextParallel:
    """The assignment of positions to ranks: round robin, `interleave` tokens at a time (S-18).

    Parameters
    ----------
    world : int
        Number of ranks, 1 to 1024.
    interleave : int
        Number of consecutive tokens that one rank owns, >= 1.
    """

    world: int
    interleave: int = 1

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises
        ------
        InvalidArgument
            `world` or `interleave` is not in its range.
        """
        if not 1 <= self.world <= 1024:
            raise InvalidArgument("world", self.world, "1 to 1024")
        if self.interleave < 1:
            raise InvalidArgument("interleave", self.interleave, ">= 1")

    def owner(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rank that caches each position, ``(p // interleave) % world``."""
        return (positions // self.interleave) % self.world

    def local_len(self, seq_len: int, rank: int) -> int:
        """Return how many of a row's `seq_len` tokens a rank caches.

        Every whole round assigns `interleave` tokens to each rank. The remaining tokens are
        assigned from rank 0 on. The result may be 0; the rank then contributes ``(0, -inf)``
        (S-6, S-8).
        """
        rounds, left = divmod(seq_len, self.world * self.interleave)
        mine = min(max(left - rank * self.interleave, 0), self.interleave)
        return rounds * self.interleave + mine

    def local_positions(self, seq_len: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's cached tokens, ascending, int64 [local_len]."""
        local = np.arange(self.local_len(seq_len, rank))
        rounds, inside = np.divmod(local, self.interleave)
        return (rounds * self.world + rank) * self.interleave + inside


UNDIVIDED = ContextParallel(1)


def rank_batch(problem: Problem, batch: Batch, group: ContextParallel, rank: int) -> Batch:
    """Return a causal step as one rank runs it: each query token is a separate row (S-18).

    A row's ``seq_len`` is the number of keys that its query sees on this rank. If there are none,
    the row is a padded row, and its output is ``(0, -inf)`` (S-6). Only the owner of a token writes
    it. The block ids are those of the whole group; each block has ``block_size`` tokens on every
    rank.

    Parameters
    ----------
    problem : Problem
        The problem of one rank's cache; ``block_size`` is a multiple of the group's interleave. It
        has no rope: a rank's indices are not positions, so the caller rotates queries and keys.
    batch : Batch
        Causal, without explicit slots; its blocks span ``block_size * world`` tokens.
    group : ContextParallel
    rank : int
        0 to ``world - 1``.

    Returns
    -------
    Batch
        It has explicit slots; slot -1 marks tokens of other ranks.

    Raises
    ------
    InvalidArgument
        The problem has a rope.
    """
    if problem.rope is not None:
        raise InvalidArgument("rope", problem.rope, "no rope on a rank of a divided cache")
    seq_lens = np.zeros(batch.num_tokens, np.int32)
    slots = np.full(batch.num_tokens, NO_SLOT, np.int64)
    table = np.full((batch.num_tokens, batch.block_table.shape[1]), NO_SLOT, np.int32)
    for row, span in enumerate(query_spans(batch)):
        seq_len = int(batch.seq_lens[row])
        if seq_len == 0:
            continue
        positions = np.arange(seq_len - (span.stop - span.start), seq_len)  # [q]
        table[span] = batch.block_table[row]
        seq_lens[span] = [group.local_len(p + 1, rank) for p in positions.tolist()]
        last = seq_lens[span].astype(np.int64) - 1  # local index of the newest key
        mine = group.owner(positions) == rank
        slots[span][mine] = slots_of(batch.block_table[row], last[mine], problem.block_size)
    return replace(
        batch,
        cu_seqlens_q=np.arange(batch.num_tokens + 1, dtype=np.int32),
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=slots,
    )


def attend_rank(
    problem: Problem,
    batch: Batch,
    image: CacheImage,
    group: ContextParallel,
    rank: int,
    *,
    rounding: Rounding = Rounding.SPEC,
) -> Answer:
    """Attend every query to the keys that one rank owns (S-18).

    The merged results of all ranks are the result over all keys. Global positions determine which
    keys a query sees: a rank's local length is not the causal bound of its keys.
    """
    visible = []
    for seen in visibility(problem, batch):
        mine = group.owner(np.arange(seen.shape[1])) == rank  # [S]
        visible.append(seen & mine)
    return attend_visible(problem, batch, image, visible, rounding)
