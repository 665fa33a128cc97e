"""Ragged rows with keys and values of every head: what materialized attention is asked (S-21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Queries of some rows, and the up-projected keys and values that they attend to.

    Arrays may be non-contiguous views: ``k_nope`` and ``v`` are often halves of one projection
    [Tk, H, N + V]. Keys past ``cu_seqlens_k[-1]``, and those of rows without a query, may hold any
    bits (S-9), as may queries past ``cu_seqlens_q[-1]``.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        Prefix sums of the rows' queries and keys, starting at 0; the last entries are at most T
        and Tk. A row may have more queries than keys, and none of either.
    q_nope : dtype [T, H, N]
        Not absorbed.
    q_pe : dtype [T, H, P]
        Rotated.
    k_nope : dtype [Tk, H, N]
    k_pe : dtype [Tk, P]
        Rotated; all heads share it.
    v : dtype [Tk, H, V]
    causal : bool
        Query i of n sees key j of k iff ``j <= k - n + i`` (aligned to the bottom right); else
        every key of its row, as a chunk of context is seen by the tokens behind it.
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
        """B."""
        return len(self.cu_seqlens_q) - 1

    @property
    def num_tokens(self) -> int:
        """T, padded queries included."""
        return int(self.q_nope.shape[0])

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """Queries of each row, int32 [B]."""
        return np.diff(self.cu_seqlens_q).astype(np.int32)

    @property
    def query_width(self) -> int:
        """N + P."""
        return int(self.q_nope.shape[2] + self.q_pe.shape[2])

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Keys of each row, int32 [B]."""
        return np.diff(self.cu_seqlens_k).astype(np.int32)
