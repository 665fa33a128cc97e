"""Rule S-3: positions of query tokens, and the slots their keys are written to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.masks import decode_mask
from paged_mla_reference.rules.paging import NO_SLOT, query_spans, slots_of
from paged_mla_shared.problem import Batch, Mask, Metadata, Problem


def metadata(problem: Problem, batch: Batch) -> Metadata:
    """Return what a plan derives from lengths, table and mask (S-1, S-3).

    Token i of a row has index ``seq_len - query_len + i`` and its key goes to the slot of that
    index. Its position is the same number, except in a draft tree, where it is ``context_len`` plus
    the node's depth: siblings share a position, never a slot.

    A non-causal row may have more queries than keys (S-2). The index of its first queries is then
    negative: they are in front of the row's first position, have position 0 and no slot, and see
    all keys of the row as the others do.

    Returns
    -------
    Metadata
        Position 0 and slot -1 for padding (tokens of rows with ``seq_len`` 0, and tokens at or
        past ``cu_seqlens_q[-1]``) and for queries in front of a row's first position.
        ``batch.slot_mapping`` plays no part.
    """
    positions = np.zeros(batch.num_tokens, np.int64)
    slots = np.full(batch.num_tokens, NO_SLOT, np.int64)
    depths = _depths(problem, batch)
    for row, span in enumerate(query_spans(batch)):
        seq_len = int(batch.seq_lens[row])
        if seq_len == 0:
            continue
        first = seq_len - (span.stop - span.start)  # below 0 if there are more queries than keys
        positions[span] = np.maximum(first + depths[row], 0)
        index = np.arange(max(first, 0), seq_len)
        with_slots = slice(span.stop - len(index), span.stop)
        slots[with_slots] = slots_of(batch.block_table[row], index, problem.block_size)
    return Metadata(positions=positions, slot_mapping=slots)


def _depths(problem: Problem, batch: Batch) -> list[NDArray[np.int64]]:
    """Return each query's distance from the end of its row's context, one int64 [q] per row.

    A tree node is as deep as the number of drafts it sees besides itself.
    """
    if problem.mask is Mask.TREE:
        return [tree.sum(axis=1, dtype=np.int64) - 1 for tree in decode_mask(problem, batch)]
    return [np.arange(q, dtype=np.int64) for q in batch.query_lens.tolist()]
