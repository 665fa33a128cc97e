"""Fill a cache with poison in places that no rule allows to be read (S-9), in any format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dtypes import largest_below, numpy_dtype
from paged_mla_shared.layout import CacheImage, CacheLayout

HUGE = 1e30


def poisoned_image(layout: CacheLayout, block_ids: NDArray[np.int64] | None = None) -> CacheImage:
    """Return a cache without any written token, in which `block_ids` are listed.

    In a listed block, all fields of a token row are NaN at even slots and huge at odd slots; the
    gaps between rows, and the scales, repeat a NaN of the latents' type. All other blocks and
    their scales repeat a NaN and a huge element of that type.
    """
    image = CacheImage.without_blocks(layout, _elements(layout.format.ckv_dtype, 1).view(np.uint8))
    if block_ids is None:
        return image
    gap = image.poison[: len(image.poison) // 2]
    blocks = np.tile(gap, (len(block_ids), layout.block_bytes // len(gap)))
    fields = [_elements(f.dtype, f.count) for f in layout.format.fields(layout.dims)]
    rows = np.hstack([elements.view(np.uint8).reshape(2, -1) for elements in fields])
    layout.rows(blocks)[...] = rows[layout.slots(block_ids) % 2]
    return CacheImage(layout, block_ids, blocks, image.poison)


def _elements(dtype: str, count: int) -> NDArray[Any]:
    """Return `count` NaNs followed by `count` huge numbers."""
    both = np.empty(2 * count, numpy_dtype(dtype))
    both[:count] = np.nan
    both[count:] = largest_below(dtype, HUGE)
    return both
