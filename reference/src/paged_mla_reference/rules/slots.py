"""Slots inside raw blocks, and what a cache format does to the tokens in them (S-11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.layout import CacheLayout

Tokens = tuple[NDArray[Any], NDArray[Any]]  # ckv [n, R] and k_pe [n, P]


@dataclass(frozen=True)
class Slots:
    """Slots inside raw blocks: token ``token[i]`` of ``blocks[block[i]]``.

    Parameters
    ----------
    layout : CacheLayout
    blocks : uint8 [m, block_bytes]
    block, token : int64 [n]
    """

    layout: CacheLayout
    blocks: NDArray[np.uint8]
    block: NDArray[np.int64]
    token: NDArray[np.int64]

    @property
    def at(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of the tokens in what is [m, block_size, ...]."""
        return self.block, self.token

    @property
    def scale_at(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of the tokens' scales in what is [m, G], for formats whose blocks have any."""
        scales = self.layout.format.scales_per_block(self.layout.block_size)
        return self.block, self.token * scales // self.layout.block_size

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All rows, uint8 [m, block_size, token_bytes], to be read and written."""
        return self.layout.rows(self.blocks)

    @property
    def scales(self) -> NDArray[np.float32]:
        """All scales, float32 [m, G], to be read and written."""
        return self.layout.scales(self.blocks)

    def field(self, name: str) -> NDArray[Any]:
        """Return one field of all rows, [m, block_size, count], to be read and written."""
        return self.layout.field(self.blocks, name)


@dataclass(frozen=True)
class Encoding:
    """What a format does to tokens.

    Parameters
    ----------
    store : callable
        Writes tokens to slots, in place: rows and the scales that go with them, nothing else.
    load : callable
        Returns the tokens in slots, in any type that holds their values exactly.
    """

    store: Callable[[Slots, NDArray[Any], NDArray[Any]], None]
    load: Callable[[Slots], Tokens]
