"""Rule S-3: the positions of query tokens, and the slots to which their keys are written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.masks import decode_mask
from paged_mla_reference.rules.paging import NO_SLOT, query_spans, slots_of
from paged_mla_shared.problem import Batch, Mask, Metadata, Problem


def metadata(problem: Problem, batch: Batch) -> Metadata:
    """Return the positions and slots that follow from lengths, block table and mask (S-1, S-3).

    Token i of a row has the index ``seq_len - query_len + i``, and its key has the slot of that
    index. Its position is equal to its index, except in a draft tree: there it is ``context_len``
    plus the depth of the node. Siblings share a position but never a slot.

    A non-causal row may have more queries than keys (S-2). Its first queries then have a negative
    index: they are in front of the row's first position, have position 0 and no slot, and see all
    keys of the row like the row's other queries.

    Returns
    -------
    Metadata
        Position 0 and slot -1 for padding (tokens of rows with ``seq_len`` 0, and tokens at or
        past ``cu_seqlens_q[-1]``) and for queries in front of a row's first position.
        ``batch.slot_mapping`` is ignored.
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

    The depth of a tree node is the number of other draft nodes that it sees.
    """
    if problem.mask is Mask.TREE:
        return [tree.sum(axis=1, dtype=np.int64) - 1 for tree in decode_mask(problem, batch)]
    return [np.arange(q, dtype=np.int64) for q in batch.query_lens.tolist()]
