"""Rules S-6 and S-17: padding a step to the fixed shapes of a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.masks import decode_mask, spell_mask
from paged_mla_reference.rules.paging import NO_SLOT
from paged_mla_shared.problem import Batch, Mask, Problem

UNREADABLE_BLOCK = 2**31 - 1


def pad_batch(
    problem: Problem, batch: Batch, num_rows: int, num_tokens: int, padded_query_len: int = 0
) -> Batch:
    """Return the step padded to `num_rows` rows and `num_tokens` tokens, behind the real ones.

    Padded rows have ``seq_len`` 0. Padded tokens are NaN, and padded table entries are not legal
    block ids: an engine may leave any bits there (S-9). Real tokens keep their outputs bit for bit,
    and padded tokens have the output ``(0, -inf)`` (S-6).

    Parameters
    ----------
    problem : Problem
    batch : Batch
    num_rows, num_tokens : int
        At least the batch's own numbers, plus `padded_query_len` tokens for each padded row.
    padded_query_len : {0, 1}
        Query tokens of a padded row. Some engines repeat the last entry of ``cu_seqlens_q`` (0);
        the decode graphs of other engines have one token in every row (1).
    """
    more = num_rows - batch.num_rows
    last = int(batch.cu_seqlens_q[-1])
    ends = last + padded_query_len * np.arange(1, more + 1, dtype=np.int32)
    mask = batch.mask
    if problem.mask is Mask.TREE:
        trees = decode_mask(problem, batch) + [np.eye(padded_query_len, dtype=bool)] * more
        lengths = _extend(batch.seq_lens, num_rows, 0)
        spelling, most = problem.mask_spelling, problem.max_draft_tokens
        mask = spell_mask(trees, spelling, lengths, most, num_tokens)
    slots = batch.slot_mapping
    return replace(
        batch,
        cu_seqlens_q=np.concatenate([batch.cu_seqlens_q, ends.astype(np.int32)]),
        seq_lens=_extend(batch.seq_lens, num_rows, 0),
        block_table=_extend(batch.block_table, num_rows, UNREADABLE_BLOCK),
        q_nope=_extend(batch.q_nope, num_tokens, np.nan),
        q_pe=_extend(batch.q_pe, num_tokens, np.nan),
        ckv=_extend(batch.ckv, num_tokens, np.nan),
        k_pe=_extend(batch.k_pe, num_tokens, np.nan),
        mask=mask,
        slot_mapping=None if slots is None else _extend(slots, num_tokens, NO_SLOT),
    )


def _extend(array: NDArray[Any], length: int, fill: float) -> NDArray[Any]:
    """Return `array` with its first axis extended to `length`."""
    out = np.full((length, *array.shape[1:]), fill, array.dtype)
    out[: len(array)] = array
    return out
