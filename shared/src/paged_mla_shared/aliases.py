"""Compute the blocks that are accessed when offsets of large caches lose their high bits.

A dump that lists these blocks shows which offset has wrapped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_OFFSET_BITS = (31, 32)  # of elements, and of bytes
_ID_BITS = (16, 24)


def alias_blocks(block_ids: NDArray[np.int64], stride: int, itemsize: int) -> NDArray[np.int64]:
    """Return the ids of the wrong blocks that wrapped offsets of `block_ids` would reach, sorted.

    The blocks in `block_ids` are not included.

    Parameters
    ----------
    block_ids : int64 [n]
        Block ids, each >= 0.
    stride : int
        The number of elements from one block to the next.
    itemsize : int
        The number of bytes of an element.
    """
    ids = block_ids.astype(np.int64)
    found = [ids & (2**bits - 1) for bits in _ID_BITS]
    for distance in {stride, stride * itemsize}:
        found += [ids * distance % 2**bits // distance for bits in _OFFSET_BITS]
    return np.setdiff1d(np.concatenate(found), ids)
