"""Rule S-10: writing tokens to a paged cache and reading them from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.encoding import ENCODINGS
from paged_mla_reference.rules.paging import slots_of
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.rules.slots import Slots, Tokens
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem


def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
    """Return the cache with the step's latents and keys written to it (S-10).

    Token t is written to ``batch.slot_mapping[t]`` if the batch has a slot mapping, and otherwise
    to the slot of rules S-1 and S-3. A token with slot -1 is not written. The function writes
    every byte of a written slot. It does not change other bytes of the cache, such as the gaps
    between slots, and it does not change the caller's arrays. With a rope, ``k_pe`` is first
    rotated at the token's position and rounded to the problem's dtype (S-12).
    """
    slots = slots_to_write(problem, batch)
    written = slots >= 0
    k_pe = batch.k_pe[written]
    if problem.rope is not None:
        positions = metadata(problem, batch).positions
        turned = rotate(widen(k_pe), positions[written], problem.rope)
        k_pe = round_to(turned, problem.dtype)
    return write_slots(image, slots[written], batch.ckv[written], k_pe)


def slots_to_write(problem: Problem, batch: Batch) -> NDArray[np.int64]:
    """Return the slot of each token, int64 [T]; -1 for a token without a slot.

    The slots are ``batch.slot_mapping`` if it is present, and otherwise the slots of rules S-1 and
    S-3.
    """
    if batch.slot_mapping is not None:
        return batch.slot_mapping
    return metadata(problem, batch).slot_mapping


def gather_context(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
    """Return the cached latents and keys of every row, row after row.

    A value that is not of the problem's dtype is rounded to float32 and then to the dtype (S-11).

    Returns
    -------
    ckv : dtype [K, R]
        K = ``sum(seq_lens)``; the function reads no slot past a row's length (S-9).
    k_pe : dtype [K, P]
        Rotated, as cached.
    """
    slots = [np.zeros(0, np.int64)]
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        slots.append(slots_of(batch.block_table[row], np.arange(seq_len), problem.block_size))
    ckv, k_pe = read_slots(image, np.concatenate(slots))
    return _in_dtype(ckv, problem.dtype), _in_dtype(k_pe, problem.dtype)


def _in_dtype(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return values as `dtype`; values that already have this type keep every bit."""
    return x if x.dtype == numpy_dtype(dtype) else round_to(round_to(x, "float32"), dtype)


def read_slots(image: CacheImage, slots: NDArray[np.int64]) -> Tokens:
    """Return ``ckv`` [n, R] and ``k_pe`` [n, P] of the given slots; read no other slot."""
    return ENCODINGS[image.layout.format.name].load(_read(image, slots))


def read_keys(image: CacheImage, slots: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the keys of the given slots, ``ckv`` and ``k_pe`` side by side, float64 [n, R + P]."""
    return np.hstack([widen(part) for part in read_slots(image, slots)])


def write_slots(
    image: CacheImage, slots: NDArray[np.int64], ckv: NDArray[Any], k_pe: NDArray[Any]
) -> CacheImage:
    """Return a new image whose `slots` hold the tokens ``ckv`` [n, R] and ``k_pe`` [n, P].

    Blocks that the image does not list are added to it, filled with poison.
    """
    opened, places = _opened(image, slots)
    ENCODINGS[image.layout.format.name].store(places, ckv, k_pe)
    return opened


def copy_slots(
    image: CacheImage, sources: NDArray[np.int64], targets: NDArray[np.int64]
) -> CacheImage:
    """Return a new image whose target slots hold the bytes and scales of the source slots.

    Copy all tokens that share a scale together, to the same places of another scale group (S-11).
    """
    source, (opened, target) = _read(image, sources), _opened(image, targets)
    target.rows[target.at] = source.rows[source.at]
    if target.scales.size:
        target.scales[target.scale_at] = source.scales[source.scale_at]
    return opened


def _read(image: CacheImage, slots: NDArray[np.int64]) -> Slots:
    """Return `slots` in a copy of the blocks that contain them."""
    block_ids, block = np.unique(slots // image.layout.block_size, return_inverse=True)
    return Slots(image.layout, image.read(block_ids), block, slots % image.layout.block_size)


def _opened(image: CacheImage, slots: NDArray[np.int64]) -> tuple[CacheImage, Slots]:
    """Return a copy of the image that lists the blocks of `slots`, and these slots in it."""
    block_size = image.layout.block_size
    added = np.setdiff1d(slots // block_size, image.block_ids)
    block_ids = np.concatenate([image.block_ids, added])
    blocks = np.concatenate([image.blocks, image.read(added)])
    order = np.argsort(block_ids)
    block = order[np.searchsorted(block_ids, slots // block_size, sorter=order)]
    opened = replace(image, block_ids=block_ids, blocks=blocks)
    return opened, Slots(image.layout, blocks, block, slots % block_size)
