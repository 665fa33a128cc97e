"""Where offsets of large caches land that lose their high bits."""

from __future__ import annotations

import numpy as np

from paged_mla_shared.aliases import alias_blocks

STRIDE = 64 * 576


def test_offsets_and_ids_that_wrap():
    """Of 2 bytes: past 2^31 and 2^32 elements, past 2^31 and 2^32 bytes, and past 16 bits."""
    block = 2**32 // STRIDE + 5
    expected = {
        block * STRIDE * size % 2**bits // (STRIDE * size) for size in (1, 2) for bits in (31, 32)
    }
    found = alias_blocks(np.array([block]), STRIDE, 2)
    assert set(found.tolist()) == expected | {block & 0xFFFF}


def test_small_caches_have_none():
    ids = np.arange(2**31 // (2 * STRIDE))
    assert not alias_blocks(ids, STRIDE, 2).size
