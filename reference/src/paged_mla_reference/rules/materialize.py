"""Conversion of a case's step to the inputs of a backend: its batch and the cache before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.cache import write_slots
from paged_mla_reference.rules.masks import PADDED_LINE, decode_mask, spell_mask
from paged_mla_reference.rules.paging import context_lens, slots_of, used_blocks
from paged_mla_shared.inputs import Step
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.poison import HUGE, poisoned_image
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Problem
from paged_mla_shared.strides import strided


def materialize(step: Step) -> tuple[Batch, CacheImage]:
    """Return the step's batch, with its mask in the problem's spelling, and the cache before it.

    The context tokens are stored at their slots (S-1). All other bytes are poison (S-9), which
    :mod:`paged_mla_shared.poison` defines. The image stores only live blocks, so the cache may have
    any number of blocks.
    """
    batch = respelt(step.problem, step.batch, step.packed_padding)
    if step.strided_inputs and batch.mask is not None:
        batch = replace(batch, mask=strided(batch.mask))
    return batch, _cache_before(step)


def live_blocks(step: Step) -> NDArray[np.int64]:
    """Return the sorted ids of all blocks that a row uses or that contain an explicit slot."""
    batch, block_size = step.batch, step.problem.block_size
    found = [used_blocks(batch, row, block_size) for row in range(batch.num_rows)]
    if batch.slot_mapping is not None:
        found.append(batch.slot_mapping[batch.slot_mapping >= 0] // block_size)
    return np.unique(np.concatenate([np.zeros(0, np.int64), *found]))


def respelt(problem: Problem, batch: Batch, packed_padding: int = 0) -> Batch:
    """Return the batch with its QLEN tree mask converted to the problem's spelling (S-14).

    A packed mask gets `packed_padding` additional bytes per line.
    """
    if problem.mask is not Mask.TREE:
        return batch
    matrices = decode_mask(replace(problem, mask_spelling=MaskSpelling.QLEN), batch)
    mask: NDArray[Any] = spell_mask(
        matrices,
        problem.mask_spelling,
        batch.seq_lens,
        problem.max_draft_tokens,
        batch.num_tokens,
    )
    if problem.mask_spelling is MaskSpelling.PACKED:
        mask = np.pad(mask, ((0, 0), (0, packed_padding)), constant_values=PADDED_LINE)
    return replace(batch, mask=mask)


def _cache_before(step: Step) -> CacheImage:
    layout, batch = step.problem.layout, step.batch
    context = [np.zeros(0, np.int64)]
    for row, length in enumerate(context_lens(batch).tolist()):
        context.append(slots_of(batch.block_table[row], np.arange(length), layout.block_size))
    image = poisoned_image(layout, live_blocks(step))
    image = write_slots(image, np.concatenate(context), step.context_ckv, step.context_k_pe)
    if step.powers_of_two:
        _round_scales_up(image)
    return image


def _round_scales_up(image: CacheImage) -> None:
    """Round an image's scales up to powers of two, in place, as some cache writers do."""
    layout = image.layout
    scales = [layout.scales(image.blocks)]
    if layout.format.inline_scales:
        scales.append(layout.field(image.blocks, "ckv_scale"))
    for some in scales:
        written = (some > 0) & (some < HUGE)
        some[written] = np.exp2(np.ceil(np.log2(some[written])))
