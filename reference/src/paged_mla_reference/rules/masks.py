"""Rules S-4 and S-14: the keys that a query sees, and the three spellings of a tree mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.paging import context_lens, query_spans
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Problem

PADDED_LINE = 0xFF  # fills the packed lines of padded tokens, which nothing may read (S-9)


def visibility(problem: Problem, batch: Batch) -> list[NDArray[np.bool_]]:
    """Return which of its row's keys each query sees (S-4).

    With ``c = context_len``, query i of a row sees key j under these conditions:

    - causal mask: ``j <= c + i`` (the mask is aligned to the bottom right);
    - non-causal mask: ``j < seq_len``, even if the row has more queries than keys;
    - tree mask: ``j < c``, or draft node ``j - c`` is set on line i of the row's mask.

    Returns
    -------
    list of bool [query_len, seq_len]
        One matrix per row; the matrix of a padded row has no columns.
    """
    trees = decode_mask(problem, batch) if problem.mask is Mask.TREE else None
    seen: list[NDArray[np.bool_]] = []
    for row, context in enumerate(context_lens(batch).tolist()):
        seq_len, query_len = int(batch.seq_lens[row]), int(batch.query_lens[row])
        if problem.mask is Mask.CAUSAL:
            last = context + np.arange(query_len)  # [q]
            seen.append(np.arange(seq_len) <= last[:, None])
        elif trees is None:
            seen.append(np.ones((query_len, seq_len), bool))
        else:
            drafts = trees[row][:, : seq_len - context]  # a padded row has no columns
            seen.append(np.hstack([np.ones((query_len, context), bool), drafts]))
    return seen


def keys_seen(problem: Problem, batch: Batch) -> NDArray[np.int64]:
    """Return how many keys each query token sees, int64 [T]; 0 for padding (S-4)."""
    seen = np.zeros(batch.num_tokens, np.int64)
    for span, visible in zip(query_spans(batch), visibility(problem, batch), strict=True):
        seen[span] = visible.sum(axis=1)
    return seen


def decode_mask(problem: Problem, batch: Batch) -> list[NDArray[np.bool_]]:
    """Return each row's draft matrix from a mask in any spelling (S-14).

    Parameters
    ----------
    problem : Problem
        Its mask is a tree mask.
    batch : Batch
        It has a mask.

    Returns
    -------
    list of bool [query_len, query_len]
        Line i marks the draft nodes of its row that node i sees. Matrices of padded rows have no
        meaning.
    """
    assert batch.mask is not None
    matrices: list[NDArray[np.bool_]] = []
    offset = 0
    for row, span in enumerate(query_spans(batch)):
        q, seq_len = span.stop - span.start, int(batch.seq_lens[row])
        if problem.mask_spelling is MaskSpelling.PACKED:
            lines = np.unpackbits(batch.mask[span], axis=1, bitorder="little")
            matrices.append(lines[:, :q].astype(bool))
            continue
        width = q if problem.mask_spelling is MaskSpelling.QLEN else seq_len
        matrix = batch.mask[offset : offset + q * width].reshape(q, width)
        offset += q * width
        matrices.append(matrix[:, width - q :] if width else np.zeros((q, q), bool))
    return matrices


def spell_mask(
    matrices: Sequence[NDArray[np.bool_]],
    spelling: MaskSpelling,
    seq_lens: NDArray[np.int32],
    max_draft_tokens: int,
    num_tokens: int | None = None,
) -> NDArray[np.bool_] | NDArray[np.uint8]:
    """Return draft matrices as a mask in a spelling; the inverse of :func:`decode_mask` (S-14).

    Parameters
    ----------
    matrices : sequence of bool [query_len, query_len]
        One per row.
    spelling : MaskSpelling
    seq_lens : int32 [B]
        Used only for FULL, whose lines start with ``seq_len - query_len`` true context columns.
    max_draft_tokens : int
        Used only for PACKED, whose lines have ``ceil(max_draft_tokens / 8)`` bytes.
    num_tokens : int, optional
        T, used only for PACKED: every bit of the lines past the rows' queries is 1. By default
        there are no such lines.

    Returns
    -------
    bool [..] or uint8 [T, W]
        uint8 for PACKED.
    """
    if spelling is MaskSpelling.PACKED:
        return _pack(matrices, -(-max_draft_tokens // 8), num_tokens)
    lines = [np.zeros(0, bool)]
    for matrix, seq_len in zip(matrices, seq_lens.tolist(), strict=True):
        q = len(matrix)
        if spelling is MaskSpelling.QLEN:
            lines.append(matrix.ravel())
        elif seq_len:
            lines.append(np.hstack([np.ones((q, seq_len - q), bool), matrix]).ravel())
    return np.concatenate(lines)


def _pack(
    matrices: Sequence[NDArray[np.bool_]], width: int, num_tokens: int | None
) -> NDArray[np.uint8]:
    live = sum(map(len, matrices))
    packed = np.full((live if num_tokens is None else num_tokens, width), PADDED_LINE, np.uint8)
    start = 0
    for matrix in matrices:
        q = len(matrix)
        line = np.zeros((q, 8 * width), bool)
        line[:, :q] = matrix
        packed[start : start + q] = np.packbits(line, axis=1, bitorder="little")
        start += q
    return packed
