"""Blocks that offsets of large caches land in when they lose their high bits.

A dump that lists them tells one way of wrapping from another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_OFFSET_BITS = (31, 32)  # of elements, and of bytes
_ID_BITS = (16, 24)


def alias_blocks(block_ids: NDArray[np.int64], stride: int, itemsize: int) -> NDArray[np.int64]:
    """Return what reads and writes of these blocks would reach, the blocks themselves left out.

    Parameters
    ----------
    block_ids : int64 [n]
        Each >= 0.
    stride : int
        Elements from one block to the next.
    itemsize : int
        Bytes of an element.
    """
    ids = block_ids.astype(np.int64)
    found = [ids & (2**bits - 1) for bits in _ID_BITS]
    for distance in {stride, stride * itemsize}:
        found += [ids * distance % 2**bits // distance for bits in _OFFSET_BITS]
    return np.setdiff1d(np.concatenate(found), ids)
