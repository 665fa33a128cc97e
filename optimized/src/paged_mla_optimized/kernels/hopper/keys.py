"""Copy key tiles of a paged cache, and the scales of keys, to shared memory.

A *box* is the rectangle of one TMA copy: BOX keys by some columns. Keys in blocks that no box fits
are copied one by one, with ``cp.async``.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from paged_mla_optimized.kernels.common.scales import has_key_scales
from paged_mla_optimized.kernels.common.segments import (
    find_segment,
    program_work_range,
    tile_of_visit,
)
from paged_mla_optimized.kernels.hopper.async_rows import copy_lines, lines_layout
from paged_mla_optimized.triton_compat.gluon_names import copy_box, copy_elements
from paged_mla_shared import formats

GROUPS_PER_BLOCK = gl.constexpr(formats.GROUPS_PER_BLOCK)

# A warp copies 128 bytes of four keys at a time, so that a thread keeps few addresses.
_KEY_LINES = gl.constexpr(lines_layout(8))


class Geometry(NamedTuple):
    """The places of blocks in a cache of 16-bit words, and the size of copies."""

    block_size: gl.constexpr
    block_rows: gl.constexpr  # rows of the cache from one block to the next
    stride_cache_row: gl.constexpr  # words from one row to the next
    BOX: gl.constexpr  # keys of one copy; 0: every thread copies 16 bytes of a key at a time


class Keys(NamedTuple):
    """A paged cache, as rows of 16-bit words, and its ``Geometry``."""

    cache_ptr: gl.tensor  # read if no box fits
    ckv_desc: gl.tensor  # [cache rows, words of a row], in boxes of latent columns
    k_pe_desc: gl.tensor  # the same tensor, in boxes of the rotated columns
    block_table_ptr: gl.tensor  # int32 [B, M]
    stride_table_row: gl.tensor
    stride_table_col: gl.tensor
    num_blocks: gl.tensor
    block_size: gl.constexpr
    block_rows: gl.constexpr
    stride_cache_row: gl.constexpr
    BOX: gl.constexpr


class ScaleFormat(NamedTuple):
    """The places of the scales of keys."""

    stride_block: gl.constexpr
    SCALES: gl.constexpr  # a value of MlaConfig.scales
    SHARES: gl.constexpr  # scales of a key


class Scales(NamedTuple):
    """Scales of the keys of a cache, and their ``ScaleFormat``."""

    ptr: gl.tensor  # float32 [] or [num_blocks, 1, G]; or the cache, if rows contain scales
    stride_block: gl.constexpr
    SCALES: gl.constexpr
    SHARES: gl.constexpr


class Ring(NamedTuple):
    """A ring of key tiles in shared memory: one role fills its stages, the others read them."""

    ckv: gl.shared_memory_descriptor  # [STAGES, TILE_N, words]
    k_pe: gl.shared_memory_descriptor  # [STAGES, TILE_N, words]
    key_scales: gl.shared_memory_descriptor  # float32 [STAGES * SHARES, TILE_N], or None
    ready: gl.shared_memory_descriptor  # barriers: a stage is filled
    empty: gl.shared_memory_descriptor  # barriers: all readers have read a stage


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of a ring, and its phase: the bit that waits on its barriers take."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@gluon.jit
def stage_behind(stage, phase, STAGES: gl.constexpr):
    """Return the result of ``next_stage``, for kernels that use `stage` afterwards.

    This function compiles to other instructions. Each kernel keeps the version with which it was
    measured.
    """
    behind = gl.where(stage == STAGES - 1, 0, stage + 1)
    return behind, gl.where(stage == STAGES - 1, phase ^ 1, phase)


@gluon.jit
def table_of_row(keys, row):
    """Return the pointer to a row's line of the block table."""
    return keys.block_table_ptr + row.to(gl.int64) * keys.stride_table_row


@gluon.jit
def clear_tail(tile, valid, TILE_N: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Set keys [valid, TILE_N) of a tile in shared memory to 0: 0 * NaN must not reach a sum."""
    layout: gl.constexpr = lines_layout(8, WARPS)
    key = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))
    for column in gl.static_range(0, WIDTH, 64):
        part = tile.slice(column, 64, dim=1)
        held = part.load(layout)
        part.store(gl.where((key < valid)[:, None], held, gl.zeros_like(held)))


@gluon.jit
def block_of_key(keys, table_row_ptr, key, seq_len):
    """Return the block of `key`, or `num_blocks` if there is none.

    There is none past `seq_len`, where the function does not read the table, and for invalid ids.
    """
    entry = (key // keys.block_size).to(gl.int64) * keys.stride_table_col
    block = gl.load(table_row_ptr + entry, mask=key < seq_len, other=-1)
    # As unsigned integers, negative ids are the largest numbers.
    return gl.minimum(block.to(gl.uint32), keys.num_blocks.to(gl.uint32)).to(gl.int32)


@gluon.jit
def _cache_row(keys, table_row_ptr, key, seq_len):
    """Return the cache row of `key`; a row past the end of the cache if the key has no block.

    Copies do not read rows outside the cache, but fill them with zeros.
    """
    block = block_of_key(keys, table_row_ptr, key, seq_len)
    return block * keys.block_rows + key % keys.block_size


@gluon.jit
def first_row(keys, table_row_ptr, tile, seq_len, TILE_N: gl.constexpr):
    """Return the cache row of a tile's first key; without boxes, the rows of all its keys."""
    key = tile * TILE_N
    if keys.BOX == 0:
        key += gl.arange(0, TILE_N, layout=gl.SliceLayout(1, _KEY_LINES))
    return _cache_row(keys, table_row_ptr, key, seq_len)


@gluon.jit
def _copy_keys(keys, at, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Start to copy columns [FIRST, FIRST + WIDTH) of the cache rows `at`, one by one.

    The kernels use this function if no box of the copy engine fits a block. Rows outside the cache
    become zeros.
    """
    line = at.to(gl.int64) * keys.stride_cache_row
    is_cached = at.to(gl.uint32) < (keys.num_blocks * keys.block_rows).to(gl.uint32)
    copy_lines(keys.cache_ptr, line, is_cached, buffer, FIRST, WIDTH, _KEY_LINES)


@constexpr_function
def arrivals(box):
    """Return how often ``copy_tile`` arrives at a barrier: for each thread of four warps, or once.

    The copy engine (TMA) arrives once.
    """
    return 128 if box == 0 else 1


@gluon.jit
def copy_tile(
    keys, ckv, k_pe, ready, at, table_row_ptr, tile, seq_len, R: gl.constexpr,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, WITH_K_PE: gl.constexpr,
):  # fmt: skip
    """Start to copy latent columns [FIRST, FIRST + WIDTH) of a key tile, and its k_pe from R on.

    `at` is the ``first_row`` of the tile. Without boxes four warps copy. The barrier `ready` counts
    ``arrivals``.
    """
    TILE_N: gl.constexpr = ckv.shape[0]
    P: gl.constexpr = k_pe.shape[1]
    if keys.BOX == 0:
        _copy_keys(keys, at, ckv, FIRST, WIDTH)
        if WITH_K_PE:
            _copy_keys(keys, at, k_pe, R, P)
        async_copy.mbarrier_arrive(ready, increment_count=False)
    else:
        mbarrier.expect(ready, TILE_N * (WIDTH + P * WITH_K_PE) * 2)
        for key in gl.static_range(0, TILE_N, keys.BOX):
            if key > 0:
                at = _cache_row(keys, table_row_ptr, tile * TILE_N + key, seq_len)
            box = ckv.slice(key, keys.BOX)
            copy_box(keys.ckv_desc, [at, FIRST], ready, box)
            if WITH_K_PE:
                box = k_pe.slice(key, keys.BOX)
                copy_box(keys.k_pe_desc, [at, R], ready, box)


@constexpr_function
def tile_arrivals(box, scales):
    """Return how often ``copy_tiles`` arrives for a tile.

    With boxes, each thread of a warp arrives once more if it copies scales.
    """
    return arrivals(box) + (32 if box > 0 and has_key_scales(scales) else 0)


@gluon.jit
def _first_scales(
    keys, scales, table_row_ptr, tile, seq_len, R: gl.constexpr, TILE_N: gl.constexpr
):
    """Return the offset of the first scale of each key of a tile, and which keys have a block."""
    WARPS: gl.constexpr = 4 if keys.BOX == 0 else 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    key = tile * TILE_N + gl.arange(0, TILE_N, layout=layout)
    block = block_of_key(keys, table_row_ptr, key, seq_len).to(gl.int64)
    exists = block < keys.num_blocks
    place = key % keys.block_size
    if scales.SCALES == "inline":
        at = ((block * keys.block_rows + place) * keys.stride_cache_row + R) // 2
    elif scales.SCALES == "per_group":
        at = block * scales.stride_block + place * GROUPS_PER_BLOCK // keys.block_size
    else:
        at = block * scales.stride_block + place
    return at, exists


@gluon.jit
def _copy_scales(scales, at, exists, buffer, stage):
    """Start to copy the scales of a tile's keys; scales of keys without a block are zero."""
    scales_ptr = scales.ptr.to(gl.pointer_type(gl.float32))
    for share in gl.static_range(scales.SHARES):
        copy_elements(
            buffer.index(stage * scales.SHARES + share), scales_ptr + at + share, mask=exists
        )


@gluon.jit
def copy_tiles(step, keys, scales, ring, R: gl.constexpr):
    """Fill the ring with the key tiles of every segment of this program, and with their scales.

    This is the role of the copying warps. A row has R words of latent columns.
    """
    SCALES: gl.constexpr = scales.SCALES
    STAGES: gl.constexpr = ring.ready.shape[0]
    K_PE_AT: gl.constexpr = R + (2 * scales.SHARES if SCALES == "inline" else 0)
    unit, end, row = program_work_range(step)
    stage = 0
    phase = 0
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        seq_len = segment.seq_len
        table_row_ptr = table_of_row(keys, row)
        for visit in range(segment.tile_begin, segment.tile_end):
            tile = tile_of_visit(step, segment, visit)
            at = first_row(keys, table_row_ptr, tile, seq_len, step.TILE_N)
            if has_key_scales(SCALES):
                scale_at, exists = _first_scales(
                    keys, scales, table_row_ptr, tile, seq_len, R, step.TILE_N
                )
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            if has_key_scales(SCALES):
                _copy_scales(scales, scale_at, exists, ring.key_scales, stage)
                if keys.BOX > 0:
                    async_copy.mbarrier_arrive(ring.ready.index(stage), increment_count=False)
            copy_tile(
                keys, ring.ckv.index(stage), ring.k_pe.index(stage), ring.ready.index(stage), at,
                table_row_ptr, tile, seq_len, K_PE_AT, 0, R, True,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)
        unit = segment.next_unit
