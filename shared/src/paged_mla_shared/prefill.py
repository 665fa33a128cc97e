"""The input of materialized attention: ragged rows with keys and values of every head (S-21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Queries of rows, and the up-projected keys and values to which they attend.

    Arrays may be non-contiguous views: ``k_nope`` and ``v`` are often halves of one projection
    [Tk, H, N + V]. Keys after ``cu_seqlens_k[-1]``, keys of rows without queries, and queries
    after ``cu_seqlens_q[-1]`` may contain any bits (S-9).

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        Prefix sums of the rows' queries and keys, starting at 0; the last entries are at most T
        and Tk. A row may have more queries than keys, and may have no queries or no keys.
    q_nope : dtype [T, H, N]
        Queries, not absorbed.
    q_pe : dtype [T, H, P]
        The rotated part of the queries, already rotated.
    k_nope : dtype [Tk, H, N]
    k_pe : dtype [Tk, P]
        The rotated keys, already rotated; all heads share them.
    v : dtype [Tk, H, V]
    causal : bool
        If true, query i of n sees key j of k iff ``j <= k - n + i`` (aligned to the bottom right).
        Otherwise every query sees every key of its row, as for a chunk of context.
    """

    cu_seqlens_q: NDArray[np.int32]
    cu_seqlens_k: NDArray[np.int32]
    q_nope: NDArray[Any]
    q_pe: NDArray[Any]
    k_nope: NDArray[Any]
    k_pe: NDArray[Any]
    v: NDArray[Any]
    causal: bool = True

    @property
    def num_rows(self) -> int:
        """The number of rows, B."""
        return len(self.cu_seqlens_q) - 1

    @property
    def num_tokens(self) -> int:
        """The number of queries, T, including padded queries."""
        return int(self.q_nope.shape[0])

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """The number of queries of each row, int32 [B]."""
        return np.diff(self.cu_seqlens_q).astype(np.int32)

    @property
    def query_width(self) -> int:
        """The number of elements of a query, N + P."""
        return int(self.q_nope.shape[2] + self.q_pe.shape[2])

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """The number of keys of each row, int32 [B]."""
        return np.diff(self.cu_seqlens_k).astype(np.int32)
