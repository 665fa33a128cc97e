"""The blocks that are accessed if offsets of large caches lose their high bits."""

from __future__ import annotations

import numpy as np

from paged_mla_shared.aliases import alias_blocks

STRIDE = 64 * 576


def test_offsets_and_ids_that_wrap():
    """Elements of 2 bytes wrap at 2^31 and 2^32 elements and bytes, and ids at 16 bits."""
    block = 2**32 // STRIDE + 5
    expected = {
        block * STRIDE * size % 2**bits // (STRIDE * size) for size in (1, 2) for bits in (31, 32)
    }
    found = alias_blocks(np.array([block]), STRIDE, 2)
    assert set(found.tolist()) == expected | {block & 0xFFFF}


def test_small_caches_have_none():
    ids = np.arange(2**31 // (2 * STRIDE))
    assert not alias_blocks(ids, STRIDE, 2).size
