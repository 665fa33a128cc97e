"""Behavior of bounded backends for illegal steps (S-1, S-2, S-9, S-14).

A backend that declares "bounded" reads and writes no byte outside the tensors of a call, for any
values in these tensors. It treats an illegal step as a legal step, which :func:`taken_as` returns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.masks import spell_mask
from paged_mla_reference.rules.paging import NO_SLOT, used_blocks
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Metadata, Problem


def legal_rows(problem: Problem, batch: Batch) -> NDArray[np.bool_]:
    """Return which rows a bounded backend computes, bool [B]; it treats other rows as padding.

    A row is legal if it satisfies all of these conditions:

    - ``0 <= cu_seqlens_q[b] <= cu_seqlens_q[b + 1]``, and the row starts at or after the end of
      every earlier row.
    - ``0 <= seq_len <= max_model_len``, and the table has a column for each block of the row.
    - With a causal or tree mask, ``seq_len`` is 0 or at least ``query_len``.
    - With a tree mask, ``query_len <= max_draft_tokens``, and the elements of the row's lines are
      inside the mask. Illegal rows have elements in a flat mask too: every row has
      ``query_len * query_len`` (QLEN) or ``query_len * seq_len`` (FULL) elements, or none if a
      factor is negative.

    The block ids in the table do not affect the result.
    """
    starts, ends, seq_lens = _lengths(batch)
    query_lens = ends - starts
    earlier = np.maximum.accumulate(np.append(0, ends[:-1]))[: batch.num_rows]
    legal = (starts >= earlier) & (query_lens >= 0)
    legal &= (seq_lens >= 0) & (seq_lens <= problem.max_model_len)
    legal &= seq_lens <= batch.block_table.shape[1] * problem.block_size
    if problem.mask is not Mask.NON_CAUSAL:
        legal &= (seq_lens == 0) | (seq_lens >= query_lens)
    if problem.mask is Mask.TREE:
        assert batch.mask is not None
        legal &= query_lens <= problem.max_draft_tokens
        if problem.mask_spelling is not MaskSpelling.PACKED:
            ends_inside = [end <= batch.mask.size for _, end in _elements(problem, batch)]
            legal &= np.array(ends_inside, bool)
    return legal


def taken_as(problem: Problem, batch: Batch) -> Batch:
    """Return the legal step that a bounded backend treats `batch` as.

    - An illegal row (:func:`legal_rows`) has ``seq_len`` 0. Its tokens, and tokens that belong to
      no row, are padding and keep their places: tokens in front of the first row become an
      additional row, and a padded row may have more tokens than a draft tree.
    - A legal row that reaches past T is cut at T: its remaining tokens keep their positions and
      slots.
    - A block id outside the cache has no slots. The result has block 0 instead, so the outputs of
      this row have no meaning (:func:`has_meaning`).
    - An explicit slot outside the cache becomes -1, and so does a derived slot of a block outside
      the cache. The result always has explicit slots, even if `batch` has none.

    Parameters
    ----------
    problem : Problem
    batch : Batch
        Its shapes and dtypes are legal; its values are arbitrary.

    Returns
    -------
    Batch
    """
    legal = legal_rows(problem, batch)
    tokens = batch.num_tokens
    starts, ends, seq_lens = _lengths(batch)
    cut_off = np.maximum(ends - tokens, 0) - np.maximum(starts - tokens, 0)  # for legal rows
    lengths = np.where(legal, np.maximum(seq_lens - cut_off, 0), 0)
    bounds = _bounds(starts.clip(0, tokens), ends.clip(0, tokens), legal)
    trees = _trees(problem, batch, np.diff(bounds), legal) if problem.mask is Mask.TREE else []
    table = batch.block_table
    if bounds[0]:
        trees = [np.eye(bounds[0], dtype=bool), *trees]
        bounds, lengths = np.append(0, bounds), np.append(0, lengths)
        table = np.concatenate([table[:1], table])
    taken = replace(
        batch,
        cu_seqlens_q=bounds.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        block_table=table,
    )
    if problem.mask is Mask.TREE:
        spelling, most = problem.mask_spelling, max(problem.max_draft_tokens, *map(len, trees), 0)
        taken = replace(taken, mask=spell_mask(trees, spelling, taken.seq_lens, most, tokens))
    named = batch.slot_mapping
    slots = metadata(problem, taken).slot_mapping if named is None else named
    inside = (slots >= 0) & (slots < problem.num_blocks * problem.block_size)
    exists = (table >= 0) & (table < problem.num_blocks)
    return replace(
        taken,
        block_table=np.where(exists, table, 0).astype(np.int32),
        slot_mapping=np.where(inside, slots, NO_SLOT),
    )


def planned_as(problem: Problem, batch: Batch) -> Metadata:
    """Return the positions and slots that a bounded backend derives for `batch`."""
    taken = taken_as(problem, replace(batch, slot_mapping=None))
    assert taken.slot_mapping is not None
    return Metadata(metadata(problem, taken).positions, taken.slot_mapping)


def has_meaning(problem: Problem, batch: Batch) -> NDArray[np.bool_]:
    """Return for which tokens of `batch` the rules define an output, bool [T].

    The rules define no output for the tokens of a row that uses a block outside the cache. They
    define no output for the tokens of a row that is cut at T either, unless the mask is causal. The
    output of padding is ``(0, -inf)``.
    """
    known = np.ones(batch.num_tokens, bool)
    starts, ends, _ = _lengths(batch)
    unknown = strange_rows(problem, batch)
    if problem.mask is not Mask.CAUSAL:
        unknown |= legal_rows(problem, batch) & (ends > batch.num_tokens)
    for row in np.flatnonzero(unknown).tolist():
        known[starts[row] : ends[row]] = False
    return known


def strange_rows(problem: Problem, batch: Batch) -> NDArray[np.bool_]:
    """Return which legal rows use a block outside the cache, bool [B]."""
    strange = legal_rows(problem, batch)
    for row in np.flatnonzero(strange).tolist():
        used = used_blocks(batch, row, problem.block_size)
        strange[row] = ((used < 0) | (used >= problem.num_blocks)).any()
    return strange


def _lengths(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and the end of each row's tokens, and its ``seq_len``, as int64 [B]."""
    sums = batch.cu_seqlens_q.astype(np.int64)
    return sums[:-1], sums[1:], batch.seq_lens.astype(np.int64)


def _bounds(
    starts: NDArray[np.int64], ends: NDArray[np.int64], legal: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return prefix sums in which legal rows have their own tokens, int64 [B + 1].

    The last illegal row between two legal rows has the other tokens between them. The first entry
    is above 0 if the first row is legal and starts above 0.
    """
    before = np.maximum.accumulate(np.append(0, np.where(legal, ends, 0)))  # [B + 1]
    return np.where(np.append(legal, False), np.append(starts, 0), before)


def _elements(problem: Problem, batch: Batch) -> list[tuple[int, int]]:
    """Return the start and the end of each row's elements in a flat mask."""
    starts, ends, seq_lens = _lengths(batch)
    query_lens = (ends - starts).tolist()
    columns = query_lens if problem.mask_spelling is MaskSpelling.QLEN else seq_lens.tolist()
    counts = [max(q, 0) * max(n, 0) for q, n in zip(query_lens, columns, strict=True)]
    return list(pairwise(accumulate(counts, initial=0)))  # Python integers: sums cannot overflow


def _trees(
    problem: Problem, batch: Batch, query_lens: NDArray[np.int64], legal: NDArray[np.bool_]
) -> list[NDArray[np.bool_]]:
    """Return each row's draft matrix [query_len, query_len], without its tokens past T."""
    assert batch.mask is not None
    trees = [np.eye(q, dtype=bool) for q in query_lens.tolist()]
    starts, ends, seq_lens = _lengths(batch)
    elements = _elements(problem, batch)
    for row in np.flatnonzero(legal & (seq_lens > 0)).tolist():
        kept = len(trees[row])
        if problem.mask_spelling is MaskSpelling.PACKED:
            span = slice(starts[row], starts[row] + kept)
            lines = np.unpackbits(batch.mask[span], axis=1, bitorder="little").astype(bool)
        else:
            whole = int(ends[row] - starts[row])
            lines = batch.mask[slice(*elements[row])]
            lines = lines.reshape(whole, -1)[:, -whole:] if whole else trees[row]
        trees[row] = lines[:kept, :kept]
    return trees
