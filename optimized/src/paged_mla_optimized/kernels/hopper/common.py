"""What the Hopper kernels share: the segments of a part, what its queries see, tails of blocks.

A *segment* is the piece of one group of query tiles that one part of the grid works on (see
``schedule.py``). Every role of a kernel walks the same segments and counts the same key tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.language import PropagateNan

from paged_mla_optimized.kernels.common.handover import (
    await_state,
    forget_state,
    leave_state,
    state_of_program,
)
from paged_mla_optimized.kernels.common.opaque import opaque
from paged_mla_optimized.kernels.common.schedule import (
    fixed_partial,
    group_of_unit,
    lanes_of_group,
    partial_of_program,
    row_of_unit,
    seen_tiles,
    share_of_program,
    split_of_unit,
    unit_after,
    visited_tile,
)
from paged_mla_shared import formats

GROUPS_PER_BLOCK = gl.constexpr(formats.GROUPS_PER_BLOCK)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-1e30)  # a finite peak: exp2 of -inf minus it is 0, never NaN
LAZY = gl.constexpr(8.0)  # weights may reach 2 ** 8 before the answers are rescaled

_ALL_NAN = gl.constexpr(PropagateNan.ALL)

# Waits for the threads of a role; Triton 3.6 has the other name.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def partial_pairs(
    cut_ptr, shares_ptr, place, FIXED_SPLITS: gl.constexpr, TILE_M: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return where the pairs of a segment's partial lie; `place` is that of ``find_segment``."""
    tile = place if FIXED_SPLITS > 0 else partial_of_program(cut_ptr, shares_ptr, place)
    return tile * TILE_M + gl.arange(0, TILE_M, layout=layout)


@gluon.jit
def find_segment(
    unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
    MASK: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Return the segment of a part that starts with `unit`, of `row` or one after it.

    With FIXED_SPLITS it is one split, or what a cut leaves of one.

    Returns
    -------
    following : unit of the tile after the segment
    place, is_whole : whether it begins its group, or of which partial it is the split; and whether
        it is all of its group
    is_left, is_taken : whether another program goes on with its sums, and whether it goes on with
        those of another
    row, tile_m, seq_len, context_len : whose queries, which query tile of the row
    tile_begin, tile_end : its key tiles that some query sees
    tile_edge : first key tile that some query does not see in full
    """
    row = row_of_unit(unit_starts_ptr, row, unit)
    lanes = lanes_of_group(cut_ptr)
    if FIXED_SPLITS > 0:
        group, splits, split, first_tile, _, split_begin, split_end, after = split_of_unit(
            unit_starts_ptr, cut_ptr, row_lens_ptr, row, unit, TILE_N
        )
        tile_m = group * lanes + gl.program_id(0) % lanes
        place = fixed_partial(row, tile_m, splits, split, gl.num_programs(0), FIXED_SPLITS)
        place = place.to(gl.int32)
        is_whole = splits == 1
        unit = gl.maximum(unit, split_begin)
        stop = gl.minimum(end, split_end)
        is_left = unit > split_begin
        is_taken = stop < split_end
        origin = split_begin - first_tile  # unit of the group's first key tile, were it one split
        following = after  # past `end` where this is taken
    else:
        group, origin, group_end = group_of_unit(
            unit_starts_ptr, cut_ptr, row_lens_ptr, row, unit, TILE_N
        )
        tile_m = group * lanes + gl.program_id(0) % lanes
        place = unit == origin
        stop = gl.minimum(end, group_end)
        is_whole = place & (stop == group_end)
        is_left = False
        is_taken = False
        following = unit_after(cut_ptr, stop, group_end)
    seq_len, context_len, tile_begin, tile_end, tile_edge = seen_tiles(
        token_starts_ptr, row_lens_ptr, row, tile_m, num_heads, unit - origin, stop - origin, MASK,
        TILE_M, TILE_N,
    )  # fmt: skip
    return (
        following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, context_len,
        tile_begin, tile_end, tile_edge,
    )  # fmt: skip


@gluon.jit
def state_pairs(program, TILE_M: gl.constexpr, layout: gl.constexpr):
    """Return where the pairs of a program's state lie; the same again follows, for what is left."""
    pair = state_of_program(program) * TILE_M + gl.arange(0, TILE_M, layout=layout)
    # Otherwise addresses of states would be found before all loops, and spilled.
    return opaque(pair).to(gl.int64)


@gluon.jit
def taken_pairs(
    shares_ptr, role, FIXED_SPLITS: gl.constexpr, TILE_M: gl.constexpr, layout: gl.constexpr
):
    """Wait for the state that this role goes on with; return where its pairs lie."""
    source, word_ptr = await_state(shares_ptr, role, FIXED_SPLITS)
    thread_barrier()
    forget_state(word_ptr)
    return state_pairs(source, TILE_M, layout)


@gluon.jit
def state_stored(shares_ptr, role, FIXED_SPLITS: gl.constexpr):
    """Let another program go on with what all threads of this role have stored."""
    thread_barrier()
    leave_state(shares_ptr, role, FIXED_SPLITS)


@gluon.jit
def query_pairs(
    token_starts_ptr, row, tile_m, num_heads, TILE_M: gl.constexpr, layout: gl.constexpr
):
    """Unfold a query tile into token and head, int64, index in the row, and which are alive."""
    start = gl.load(token_starts_ptr + row)
    query_len = gl.load(token_starts_ptr + row + 1) - start
    pair = tile_m * TILE_M + gl.arange(0, TILE_M, layout=layout)
    index = pair // num_heads
    return (start + index).to(gl.int64), (pair % num_heads).to(gl.int64), index, index < query_len


@gluon.jit
def kept_pairs(
    token_starts_ptr, row, tile_m, num_heads, FIXED_SPLITS: gl.constexpr, TILE_M: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return which pairs of a query tile have a place of their own among the partials.

    All of them, but with FIXED_SPLITS none of a lane without queries.
    """
    kept = gl.full([TILE_M], True, gl.int1, layout)
    if FIXED_SPLITS > 0:
        _token, _head, _index, kept = query_pairs(
            token_starts_ptr, row, tile_m, num_heads, TILE_M, layout
        )
    return kept


@gluon.jit
def store_lse(
    lse, is_whole, place, lse_ptr, partial_lse_ptr, cut_ptr, shares_ptr, token_starts_ptr, row,
    tile_m, num_heads, stride_lse_token, stride_lse_head, FIXED_SPLITS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Store the lse [64] of a query tile, or keep it as that of the partial of `place`."""
    if is_whole:
        token, head, _index, live = query_pairs(
            token_starts_ptr, row, tile_m, num_heads, 64, layout
        )
        gl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse, mask=live)
    else:
        at = partial_pairs(cut_ptr, shares_ptr, place, FIXED_SPLITS, 64, layout)
        kept = kept_pairs(token_starts_ptr, row, tile_m, num_heads, FIXED_SPLITS, 64, layout)
        gl.store(partial_lse_ptr + at, lse, mask=kept)


@gluon.jit
def copy_queries(
    q_ptr, stride_token, stride_head, token_starts_ptr, row, tile_m, num_heads, buffer,
    TILE_M: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Begin to copy columns [FIRST, FIRST + WIDTH) of a query tile; dead pairs are zeros."""
    layout: gl.constexpr = lines_layout(min(WIDTH // 8, 32))
    token, head, _, live = query_pairs(
        token_starts_ptr, row, tile_m, num_heads, TILE_M, gl.SliceLayout(1, layout)
    )
    at = token * stride_token + head * stride_head
    _copy_lines(q_ptr, at, live, buffer, FIRST, WIDTH, layout)


@constexpr_function
def lines_layout(threads, warps=4):
    """Return how warps share lines: `threads` on each, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])


# Of keys: 128 bytes of four lines at a time, so that a thread keeps few addresses.
KEY_LINES = gl.constexpr(lines_layout(8))


@gluon.jit
def _copy_lines(
    base_ptr, at, exists, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Begin to copy columns [FIRST, FIRST + WIDTH) of lines that start `at`; others are zeros."""
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        buffer, base_ptr + at[:, None] + column[None, :], mask=exists[:, None]
    )


@gluon.jit
def sees(
    key, seq_len, context_len, index, token, live, tree_words_ptr,
    MASK: gl.constexpr, TREE_WORDS: gl.constexpr,
):  # fmt: skip
    """Return which queries see which keys (S-4); `key` broadcasts with `index` and `token`."""
    if MASK == "causal":
        visible = (key <= context_len + index) & (key < seq_len)
    elif MASK == "non_causal":
        visible = (key < seq_len) & (index >= 0)
    else:
        node = key - context_len
        is_draft = (node >= 0) & (key < seq_len)
        at = token * TREE_WORDS + (node >> 5)
        context = gl.where(node < 0, -1, 0)  # every query sees it
        word = gl.load(tree_words_ptr + at, mask=is_draft & live, other=context)
        visible = ((word >> (node & 31)) & 1) != 0
    return visible


@gluon.jit
def higher(x, y):
    """Return the higher of two numbers, or NaN."""
    return gl.maximum(x, y, propagate_nan=_ALL_NAN)


@gluon.jit
def raised(peak, highest):
    """Return the peak that weights are relative to, once a tile's `highest` scores are known.

    It rises only where it must, and to an integer: what is kept of the sums so far is then a power
    of two, which bfloat16 holds exactly, and most often one.
    """
    return gl.where(highest > peak + LAZY, gl.ceil(highest), peak)


@gluon.jit
def raised_in_twos(peak, highest, has_to):
    """Return peaks [64]: both pairs of a thread rise if one of them has to, as in ``raised``.

    So the weights of neither can be made before the highest scores of both are known: the compiler
    would otherwise take one pair after the other where registers are few, and wait for shuffles
    twice.
    """
    either = gl.max(has_to.to(gl.int32).reshape([4, 2, 8]), 1)
    either = either[:, None, :].broadcast_to([4, 2, 8]).reshape([64])
    either = gl.convert_layout(either, peak.type.layout)
    return gl.where(either != 0, higher(peak, gl.ceil(highest)), peak)


@gluon.jit
def own_sums(weights):
    """Return the sums [64, 4] of what each thread holds of weights [64, N]: no shuffles."""
    return gl.sum(gl.sum(weights.reshape([64, weights.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _own_sums_at(total, pair):
    """Return where own sums [64, 4] lie in a state of the pairs that lie at `pair`."""
    own = gl.arange(0, 4, layout=gl.SliceLayout(0, total.type.layout))
    pair = gl.convert_layout(pair, gl.SliceLayout(1, total.type.layout))
    return (pair + 64)[:, None] * 512 + own[None, :]


@gluon.jit
def begin_weighing(
    is_taken, shares_ptr, partial_out_ptr, partial_lse_ptr, FIXED_SPLITS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return peak [64] and own sums [64, 4] of weights, [64, 64] in `layout`, to begin with."""
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    peak = gl.full([64], FLOOR, gl.float32, pair_layout)
    total = own_sums(gl.zeros([64, 64], gl.float32, layout))
    if FIXED_SPLITS > 0:
        if is_taken:
            pair = taken_pairs(shares_ptr, 0, FIXED_SPLITS, 64, pair_layout)
            peak = gl.load(partial_lse_ptr + pair)
            total = gl.load(partial_out_ptr + _own_sums_at(total, pair))
    return peak, total


@gluon.jit
def leave_weighing(
    peak, total, shares_ptr, partial_out_ptr, partial_lse_ptr, FIXED_SPLITS: gl.constexpr
):
    """Leave what ``begin_weighing`` takes."""
    pair_layout: gl.constexpr = peak.type.layout
    pair = state_pairs(gl.program_id(0), 64, pair_layout)
    gl.store(partial_lse_ptr + pair, peak)
    gl.store(partial_out_ptr + _own_sums_at(total, pair), total)
    state_stored(shares_ptr, 0, FIXED_SPLITS)


@gluon.jit
def clear_tail(tile, valid, TILE_N: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Zero keys [valid, TILE_N) of a tile in shared memory: 0 * NaN must not reach a sum."""
    layout: gl.constexpr = lines_layout(8, WARPS)
    key = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))
    for column in gl.static_range(0, WIDTH, 64):
        part = tile.slice(column, 64, dim=1)
        held = part.load(layout)
        part.store(gl.where((key < valid)[:, None], held, gl.zeros_like(held)))


@gluon.jit
def _cache_row(table_row_ptr, stride_table_col, key, seq_len, block_size, block_rows):
    """Return which row of the cache holds `key`; past `seq_len` one before the cache begins.

    What lies outside the cache is filled with zeros, and not read.
    """
    entry = (key // block_size).to(gl.int64) * stride_table_col
    block = gl.load(table_row_ptr + entry, mask=key < seq_len, other=0)
    return gl.where(key < seq_len, block * block_rows + key % block_size, -64)


@gluon.jit
def first_row(
    table_row_ptr, stride_table_col, tile, seq_len, block_size, block_rows, TILE_N: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Return the row of the cache that holds a tile's first key, or without boxes all its rows."""
    key = tile * TILE_N
    if BOX == 0:
        key += gl.arange(0, TILE_N, layout=gl.SliceLayout(1, KEY_LINES))
    return _cache_row(table_row_ptr, stride_table_col, key, seq_len, block_size, block_rows)


@gluon.jit
def _copy_keys(cache_ptr, stride_cache_row, at, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Begin to copy columns [FIRST, FIRST + WIDTH) of the rows `at` of the cache, one by one.

    For blocks that no box of the copy engine fits. Rows before the cache are zeros.
    """
    line = at.to(gl.int64) * stride_cache_row
    _copy_lines(cache_ptr, line, at >= 0, buffer, FIRST, WIDTH, KEY_LINES)


@constexpr_function
def arrivals(box):
    """Return how often one ``copy_tile`` arrives: each thread of four warps, or the engine."""
    return 128 if box == 0 else 1


@gluon.jit
def copy_tile(
    cache_ptr, ckv_desc, k_pe_desc, ckv, k_pe, ready, at, table_row_ptr, stride_table_col, tile,
    seq_len, block_size, block_rows, stride_cache_row, R: gl.constexpr, TILE_N: gl.constexpr,
    BOX: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, WITH_K_PE: gl.constexpr,
):  # fmt: skip
    """Ask for latent columns [FIRST, FIRST + WIDTH) of a key tile, and for its k_pe.

    Elements are 16 bits. `at` is its ``first_row``. Without boxes four warps copy; `ready` counts
    ``arrivals``.
    """
    P: gl.constexpr = k_pe.shape[1]
    if BOX == 0:
        _copy_keys(cache_ptr, stride_cache_row, at, ckv, FIRST, WIDTH)
        if WITH_K_PE:
            _copy_keys(cache_ptr, stride_cache_row, at, k_pe, R, P)
        async_copy.mbarrier_arrive(ready, increment_count=False)
    else:
        mbarrier.expect(ready, TILE_N * (WIDTH + P * WITH_K_PE) * 2)
        for key in gl.static_range(0, TILE_N, BOX):
            if key > 0:
                at = _cache_row(
                    table_row_ptr, stride_table_col, tile * TILE_N + key, seq_len, block_size,
                    block_rows,
                )  # fmt: skip
            tma.async_copy_global_to_shared(ckv_desc, [at, FIRST], ready, ckv.slice(key, BOX))
            if WITH_K_PE:
                tma.async_copy_global_to_shared(k_pe_desc, [at, R], ready, k_pe.slice(key, BOX))


@constexpr_function
def has_key_scales(scales):
    """Return whether keys, or shares of them, have scales of their own."""
    return scales not in {"none", "scalar"}


@constexpr_function
def tile_arrivals(box, scales):
    """Return how often ``copy_tiles`` arrives for a tile: a warp's threads ask for its scales."""
    return arrivals(box) + (32 if box > 0 and has_key_scales(scales) else 0)


@gluon.jit
def first_scales(
    table_row_ptr, stride_table_col, tile, seq_len, block_size, block_rows, stride_cache_row,
    stride_scales_block, R: gl.constexpr, SCALES: gl.constexpr, TILE_N: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Return where the first scale of each key of a tile lies, and which keys exist.

    R is in words of 16 bits.
    """
    WARPS: gl.constexpr = 4 if BOX == 0 else 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    key = tile * TILE_N + gl.arange(0, TILE_N, layout=layout)
    exists = key < seq_len
    entry = (key // block_size).to(gl.int64) * stride_table_col
    block = gl.load(table_row_ptr + entry, mask=exists, other=0).to(gl.int64)
    place = key % block_size
    if SCALES == "inline":
        at = ((block * block_rows + place) * stride_cache_row + R) // 2
    elif SCALES == "per_group":
        at = block * stride_scales_block + place * GROUPS_PER_BLOCK // block_size
    else:
        at = block * stride_scales_block + place
    return at, exists


@gluon.jit
def copy_scales(scales_ptr, at, exists, buffer, stage, SHARES: gl.constexpr):
    """Begin to copy the scales of a tile's keys; those of keys past the row are zero."""
    scales_ptr = scales_ptr.to(gl.pointer_type(gl.float32))
    for share in gl.static_range(SHARES):
        async_copy.async_copy_global_to_shared(
            buffer.index(stage * SHARES + share), scales_ptr + at + share, mask=exists
        )


@gluon.jit
def copy_tiles(
    cache_ptr, ckv_desc, k_pe_desc, ckv, k_pe, ready, empty, block_table_ptr, unit_starts_ptr,
    cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr, stride_table_row, stride_table_col,
    num_heads, block_size, block_rows, stride_cache_row, R: gl.constexpr, MASK: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    scales_ptr, stride_scales_block, key_scales, SCALES: gl.constexpr, SHARES: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the key tiles of every segment of this part, and scales of the keys."""
    K_PE_AT: gl.constexpr = R + (2 * SHARES if SCALES == "inline" else 0)
    unit, end, row = share_of_program(shares_ptr, FIXED_SPLITS)
    stage = 0
    phase = 0
    while unit < end:
        following, _, _, _, _, row, _, seq_len, _, tile_begin, tile_end, _ = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, TILE_M, TILE_N, FIXED_SPLITS,
        )  # fmt: skip
        table_row_ptr = block_table_ptr + row.to(gl.int64) * stride_table_row
        for visit in range(tile_begin, tile_end):
            tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
            at = first_row(
                table_row_ptr, stride_table_col, tile, seq_len, block_size, block_rows, TILE_N, BOX
            )
            if has_key_scales(SCALES):
                scale_at, exists = first_scales(
                    table_row_ptr, stride_table_col, tile, seq_len, block_size, block_rows,
                    stride_cache_row, stride_scales_block, R, SCALES, TILE_N, BOX,
                )  # fmt: skip
            mbarrier.wait(empty.index(stage), phase ^ 1)
            if has_key_scales(SCALES):
                copy_scales(scales_ptr, scale_at, exists, key_scales, stage, SHARES)
                if BOX > 0:
                    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            copy_tile(
                cache_ptr, ckv_desc, k_pe_desc, ckv.index(stage), k_pe.index(stage),
                ready.index(stage), at, table_row_ptr, stride_table_col, tile, seq_len, block_size,
                block_rows, stride_cache_row, K_PE_AT, TILE_N, BOX, 0, R, True,
            )  # fmt: skip
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        unit = following
