"""Slots inside raw blocks, and the functions that a cache format consists of (S-11)."""

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
    """Slots inside raw blocks: slot i is token ``token[i]`` of ``blocks[block[i]]``.

    Parameters
    ----------
    layout : CacheLayout
    blocks : uint8 [m, block_bytes]
    block : int64 [n]
        Index into `blocks`, 0 to m - 1.
    token : int64 [n]
        Token inside its block, 0 to block_size - 1.
    """

    layout: CacheLayout
    blocks: NDArray[np.uint8]
    block: NDArray[np.int64]
    token: NDArray[np.int64]

    @property
    def at(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of the tokens in an array [m, block_size, ...]."""
        return self.block, self.token

    @property
    def scale_at(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of the tokens' scales in an array [m, G], for formats whose blocks have scales."""
        scales = self.layout.format.scales_per_block(self.layout.block_size)
        return self.block, self.token * scales // self.layout.block_size

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Writable view of the bytes of all slots, uint8 [m, block_size, token_bytes]."""
        return self.layout.rows(self.blocks)

    @property
    def scales(self) -> NDArray[np.float32]:
        """Writable view of all scales, float32 [m, G]."""
        return self.layout.scales(self.blocks)

    def field(self, name: str) -> NDArray[Any]:
        """Return a writable view of one field of all slots, [m, block_size, count]."""
        return self.layout.field(self.blocks, name)


@dataclass(frozen=True)
class Encoding:
    """The two functions of a cache format.

    Parameters
    ----------
    store : callable
        Writes tokens to slots, in place: the bytes of the slots and their scales, nothing else.
    load : callable
        Returns the tokens in slots, in a type that holds their values exactly.
    """

    store: Callable[[Slots, NDArray[Any], NDArray[Any]], None]
    load: Callable[[Slots], Tokens]
