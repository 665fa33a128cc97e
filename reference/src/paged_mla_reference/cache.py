"""Rules S-10 and S-11: writing tokens into a paged cache, and reading them back.

Implemented formats: the plain ones, ``bf16``, ``fp16`` and ``fp32``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.paging import slots_of
from paged_mla_reference.positions import metadata
from paged_mla_reference.rope import rotate
from paged_mla_reference.rounding import round_to, widen
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.layout import CacheImage, CacheLayout
from paged_mla_shared.problem import Batch, Problem


def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
    """Return the cache after the step's latents and keys are written (S-10).

    Token t goes to ``batch.slot_mapping[t]`` if the batch names slots, else to the slot of rules
    S-1 and S-3. Every byte of a written row is written, -1 writes nothing, and no other byte
    changes: not the gaps between rows, not the caller's arrays. With a rope, ``k_pe`` is rotated
    at the token's position and rounded to the problem's dtype first (S-12).
    """
    slots = slots_to_write(problem, batch)
    written = slots >= 0
    k_pe = batch.k_pe[written]
    if problem.rope is not None:
        positions = metadata(problem, batch).positions
        turned = rotate(widen(k_pe), positions[written], problem.rope)
        k_pe = round_to(turned, problem.dtype)
    rows = encode(image.layout, batch.ckv[written], k_pe)
    return write_slots(image, slots[written], rows)


def slots_to_write(problem: Problem, batch: Batch) -> NDArray[np.int64]:
    """Return the slot of each token, named by the batch or derived, int64 [T]; -1 for none."""
    if batch.slot_mapping is not None:
        return batch.slot_mapping
    return metadata(problem, batch).slot_mapping


def gather_context(
    problem: Problem, batch: Batch, image: CacheImage
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what the cache holds for every row, row after row.

    Returns
    -------
    ckv : dtype [K, R]
        K = ``sum(seq_lens)``; nothing past a row's length is read (S-9).
    k_pe : dtype [K, P]
        Rotated, as cached.
    """
    slots = [np.zeros(0, np.int64)]
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        slots.append(slots_of(batch.block_table[row], np.arange(seq_len), problem.block_size))
    return read_slots(image, np.concatenate(slots))


def read_slots(image: CacheImage, slots: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``ckv`` [n, R] and ``k_pe`` [n, P] of those slots and of no other."""
    block_size = image.layout.block_size
    block_ids, index = np.unique(slots // block_size, return_inverse=True)
    rows = image.layout.rows(image.read(block_ids))[index, slots % block_size]
    return decode(image.layout, rows)


def write_slots(image: CacheImage, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> CacheImage:
    """Return a new image whose named slots hold `rows`, uint8 [n, token_bytes].

    Blocks not listed in the image join it, with the poison they were filled with.
    """
    block_size = image.layout.block_size
    added = np.setdiff1d(slots // block_size, image.block_ids)
    block_ids = np.concatenate([image.block_ids, added])
    blocks = np.concatenate([image.blocks, image.read(added)])
    order = np.argsort(block_ids)
    index = order[np.searchsorted(block_ids, slots // block_size, sorter=order)]
    image.layout.rows(blocks)[index, slots % block_size] = rows
    return replace(image, block_ids=block_ids, blocks=blocks)


def encode(layout: CacheLayout, ckv: NDArray[Any], k_pe: NDArray[Any]) -> NDArray[np.uint8]:
    """Return tokens as the bytes a format stores, uint8 [n, token_bytes] (S-11)."""
    values = {"ckv": ckv, "k_pe": k_pe}
    parts = []
    for field in layout.format.fields(layout.dims):
        stored = np.ascontiguousarray(values[field.name], numpy_dtype(field.dtype))
        parts.append(stored.view(np.uint8))
    return np.hstack(parts)


def decode(layout: CacheLayout, rows: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``ckv`` [n, R] and ``k_pe`` [n, P] from stored bytes [n, token_bytes] (S-11)."""
    found = {}
    for field in layout.format.fields(layout.dims):
        raw = np.ascontiguousarray(rows[:, field.offset : field.offset + field.nbytes])
        found[field.name] = raw.view(numpy_dtype(field.dtype))
    return found["ckv"], found["k_pe"]
