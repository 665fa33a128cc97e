"""Rules S-1 and S-2: the slots of positions, the blocks of rows and the lengths of contexts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.problem import Batch, Rows

NO_SLOT = -1


def blocks_of(seq_len: int, block_size: int) -> int:
    """Return the number of blocks that `seq_len` tokens occupy, ``ceil(seq_len / block_size)``."""
    return -(-seq_len // block_size)


def used_blocks(batch: Batch, row: int, block_size: int) -> NDArray[np.int64]:
    """Return the block ids of a row that may be read, int64 [blocks] (S-1, S-9).

    The row has ``ceil(seq_len / block_size)`` of them; the other table entries are unread.
    """
    return batch.block_table[row, : blocks_of(int(batch.seq_lens[row]), block_size)].astype(
        np.int64
    )


def slots_of(
    table_row: NDArray[Any], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Return the slots of tokens of one row (S-1).

    ``slot = table_row[p // block_size] * block_size + p % block_size``

    Parameters
    ----------
    table_row : int [M]
        The row's block ids; the function reads only the entries of the given positions.
    positions : int64 [n]
        Token indices inside the row, 0 to seq_len - 1.
    block_size : int
        Tokens per block.

    Returns
    -------
    int64 [n]
        Slots have 64 bits because a legal slot times a stride can exceed 31 bits.
    """
    block_ids = table_row[positions // block_size].astype(np.int64)
    return block_ids * block_size + positions % block_size


def context_lens(batch: Rows) -> NDArray[np.int64]:
    """Return the number of tokens that each row had before this step, int64 [B] (S-2).

    ``context_len = max(seq_len - query_len, 0)``. It is 0 for a padded row (``seq_len`` 0) with any
    number of query tokens, and for a non-causal row with fewer keys than queries.
    """
    before = batch.seq_lens.astype(np.int64) - batch.query_lens
    return before.clip(min=0)


def query_spans(batch: Rows) -> list[slice]:
    """Return the query tokens of each row as a slice of the token axis."""
    bounds = batch.cu_seqlens_q.tolist()
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def keys_of_tokens(batch: Rows) -> NDArray[np.int64]:
    """Return the ``seq_len`` of each query token's row, int64 [T]; 0 for padding."""
    keys = np.zeros(batch.num_tokens, np.int64)
    keys[: int(batch.cu_seqlens_q[-1])] = np.repeat(batch.seq_lens, batch.query_lens)
    return keys
