"""Where each byte of a paged cache lies, and how a cache travels without its empty blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.formats import CacheFormat


@dataclass(frozen=True)
class CacheLayout:
    """Byte addresses of a paged cache; strides may exceed the rows they carry.

    Token t of block b starts at ``b * block_stride + t * token_stride`` bytes.
    """

    format: CacheFormat
    dims: MlaDims
    block_size: int
    num_blocks: int
    token_padding: int = 0
    block_padding: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.format.token_bytes(self.dims)

    @property
    def token_stride(self) -> int:
        """Bytes from one token of a block to the next."""
        return self.token_bytes + self.token_padding

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.block_size * self.token_stride + self.block_padding

    @property
    def storage_bytes(self) -> int:
        """Bytes of the whole cache, padding included."""
        return self.num_blocks * self.block_stride

    def rows(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View raw blocks [n, block_stride] as token rows [n, block_size, token_bytes], uint8."""
        body = blocks[:, : self.block_size * self.token_stride]
        by_token = body.reshape(len(blocks), self.block_size, self.token_stride)
        return by_token[:, :, : self.token_bytes]

    def field(self, blocks: NDArray[np.uint8], name: str) -> NDArray[Any]:
        """Copy one field of raw blocks out as [n, block_size, count] in its own dtype."""
        field = next(f for f in self.format.fields(self.dims) if f.name == name)
        raw = self.rows(blocks)[:, :, field.offset : field.offset + field.nbytes]
        return np.ascontiguousarray(raw).view(numpy_dtype(field.dtype))


@dataclass(frozen=True)
class CacheImage:
    """A cache of any size: its live blocks, and the bytes every other place is filled with.

    Parameters
    ----------
    layout : CacheLayout
    block_ids : int64 [n]
        Distinct ids of the blocks listed in `blocks`.
    blocks : uint8 [n, block_stride]
        Their raw bytes, padding included.
    poison : uint8 [k]
        Pattern that, repeated from byte 0, fills the storage of all other blocks;
        ``block_stride`` is a multiple of k.
    """

    layout: CacheLayout
    block_ids: NDArray[np.int64]
    blocks: NDArray[np.uint8]
    poison: NDArray[np.uint8]

    def read(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes uint8 [m, block_stride] of any blocks, poisoned ones included."""
        repeats = self.layout.block_stride // len(self.poison)
        out = np.tile(self.poison, (len(block_ids), repeats))
        where = {int(b): i for i, b in enumerate(self.block_ids)}
        for i, block_id in enumerate(block_ids):
            if int(block_id) in where:
                out[i] = self.blocks[where[int(block_id)]]
        return out
