"""Rule S-11: the encoding of tokens in each cache format.

The plain formats, ``bf16``, ``fp16`` and ``fp32``, store tokens unchanged. The 8-bit formats are in
:mod:`paged_mla_reference.rules.fp8`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.fp8 import FP8
from paged_mla_reference.rules.slots import Encoding, Slots, Tokens
from paged_mla_shared.formats import GROUPS_PER_BLOCK, PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.layout import CacheLayout


def store_plain(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Write every token unchanged."""
    slots.field("ckv")[slots.at] = ckv
    slots.field("k_pe")[slots.at] = k_pe


def load_plain(slots: Slots) -> Tokens:
    """Return every token unchanged, bit for bit."""
    return slots.field("ckv")[slots.at], slots.field("k_pe")[slots.at]


PLAIN = {name: Encoding(store_plain, load_plain) for name in PLAIN_FORMAT_OF_DTYPE.values()}

ENCODINGS = {**PLAIN, **FP8}


def as_cached(layout: CacheLayout, ckv: NDArray[Any], k_pe: NDArray[Any]) -> Tokens:
    """Return the values that a cache holds of tokens [n, R] and [n, P] that share no scale."""
    alone = replace(layout, block_size=GROUPS_PER_BLOCK)  # a block, so a scale group, per token
    blocks = np.zeros((len(ckv), alone.block_bytes), np.uint8)
    every = np.arange(len(ckv))
    slots = Slots(alone, blocks, every, np.zeros_like(every))
    encoding = ENCODINGS[layout.format.name]
    encoding.store(slots, ckv, k_pe)
    return encoding.load(slots)
