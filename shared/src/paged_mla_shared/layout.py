"""The addresses of bytes in a paged cache, and a cache image without unused blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.formats import SCALE_DTYPE, CacheFormat


@dataclass(frozen=True)
class CacheLayout:
    """The byte addresses and the meaning of the bytes of a paged cache.

    Token t of block b starts at byte ``b * block_stride + t * token_stride``; strides can be larger
    than the rows. A single block is uint8 [block_bytes]: its ``block_stride`` bytes, then its
    scales in the scale tensor. `scale` is the layer's scale; formats without one ignore it.
    """

    format: CacheFormat
    dims: MlaDims
    block_size: int
    num_blocks: int
    token_padding: int = 0
    block_padding: int = 0
    scale: float = 1.0

    @cached_property
    def token_bytes(self) -> int:
        """The number of bytes of one token's row."""
        return self.format.token_bytes(self.dims)

    @property
    def token_stride(self) -> int:
        """The number of bytes from one token of a block to the next."""
        return self.token_bytes + self.token_padding

    @property
    def block_stride(self) -> int:
        """The number of bytes from one block to the next."""
        return self.block_size * self.token_stride + self.block_padding

    @property
    def storage_bytes(self) -> int:
        """The number of bytes of the cache tensor, including padding."""
        return self.num_blocks * self.block_stride

    @property
    def block_bytes(self) -> int:
        """The number of bytes of a single block: tokens, padding and scales."""
        return self.block_stride + self.format.scale_bytes(self.block_size)

    def slots(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of blocks, int64 [n, block_size]."""
        return block_ids[:, None] * self.block_size + np.arange(self.block_size)

    def rows(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View raw blocks [n, block_bytes] as token rows [n, block_size, token_bytes], uint8."""
        body = blocks[:, : self.block_size * self.token_stride]
        by_token = body.reshape(len(blocks), self.block_size, self.token_stride)
        return by_token[:, :, : self.token_bytes]

    def field(self, blocks: NDArray[np.uint8], name: str) -> NDArray[Any]:
        """View one field of raw blocks as [n, block_size, count] in its own dtype."""
        field = next(f for f in self.format.fields(self.dims) if f.name == name)
        raw = self.rows(blocks)[:, :, field.offset : field.offset + field.nbytes]
        return raw.view(numpy_dtype(field.dtype))

    def scales(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """View the scales of raw blocks as float32 [n, G]; G is 0 if blocks have no scales."""
        return blocks[:, self.block_stride :].view(numpy_dtype(SCALE_DTYPE))

    def scale_bytes(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View the scales of raw blocks as uint8 [n, G, 4]."""
        scales = self.scales(blocks)
        return blocks[:, self.block_stride :].reshape(*scales.shape, scales.itemsize)


@dataclass(frozen=True)
class CacheImage:
    """A cache of any size: its live blocks, and the bytes that fill all other blocks.

    Parameters
    ----------
    layout : CacheLayout
    block_ids : int64 [n]
        Distinct ids of the blocks listed in `blocks`.
    blocks : uint8 [n, block_bytes]
        The raw bytes of these blocks, including padding, each followed by its scales.
    poison : uint8 [k]
        The pattern that fills the storage of all other blocks, repeated from byte 0;
        ``block_stride`` is a multiple of k. It also fills the scales of each of these blocks,
        from their first byte.
    """

    layout: CacheLayout
    block_ids: NDArray[np.int64]
    blocks: NDArray[np.uint8]
    poison: NDArray[np.uint8]

    @classmethod
    def without_blocks(cls, layout: CacheLayout, poison: NDArray[np.uint8]) -> CacheImage:
        """Return a cache in which `poison` fills all blocks."""
        blocks = np.zeros((0, layout.block_bytes), np.uint8)
        return cls(layout, np.zeros(0, np.int64), blocks, poison)

    @property
    def poisoned_block(self) -> NDArray[np.uint8]:
        """The bytes of a block that is not listed, uint8 [block_bytes]."""
        stride = self.layout.block_stride
        sizes = stride, self.layout.block_bytes - stride
        longest = np.tile(self.poison, -(-max(sizes) // len(self.poison)))
        return np.concatenate([longest[:size] for size in sizes])

    def read(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the raw bytes of any blocks, listed or not, uint8 [m, block_bytes]."""
        if not len(self.block_ids):
            return np.tile(self.poisoned_block, (len(block_ids), 1))
        order = np.argsort(self.block_ids)
        place = np.searchsorted(self.block_ids, block_ids, sorter=order)
        found = order[np.minimum(place, len(order) - 1)]
        out: NDArray[np.uint8] = self.blocks[found]
        out[self.block_ids[found] != block_ids] = self.poisoned_block
        return out
