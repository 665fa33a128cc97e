"""Order the query tiles of a prefill: longest first, in groups of heads whose keys fit in L2.

A *query tile* is TILE_M tokens of one row. ``prefill_plan_kernel`` writes one record for each tile,
sorted by the number of key blocks that the tile sees. An *item* is one tile of one head. Items are
counted by group of heads and then by tile, with the heads of the group innermost. So the keys and
values of a group stay in L2 while all its tiles read them, and short tiles fill the gaps that long
tiles leave. All groups have the same number of heads: a smaller last group would leave programs
without work at its end.

No tile is cut over its keys, and each tile belongs to one row. So the bits of a row's output depend
on no other row (S-20).

Each program of the grid writes the records of TILES tiles, and program 0 also writes the work
record. No program depends on another. With OVERLAP the attend kernel starts while this kernel runs,
and waits for its end before it reads the records.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.optimization_barrier import opaque
from paged_mla_optimized.kernels.common.schedule import running_maximum

BLOCK_N = tl.constexpr(128)  # keys of a block; the order of tiles counts blocks
_MOST_KEYS = tl.constexpr(2**30)  # keys of all rows: the sum of two such numbers fits in int32

# Words of the record of a query tile, see ``load_tile``.
TILE_WORDS = tl.constexpr(8)  # the words after the last named one are unused
_TILE_TOKEN = tl.constexpr(0)
_TILE_COUNT = tl.constexpr(1)
_TILE_KEY_START = tl.constexpr(2)
_TILE_CONTEXT = tl.constexpr(3)
_TILE_KEY_LEN = tl.constexpr(4)

# Words of the work record of a step.
WORK_WORDS = tl.constexpr(4)
_TILES = tl.constexpr(0)
_GROUP_HEADS = tl.constexpr(1)
CLAIMED = tl.constexpr(2)  # items that programs have claimed, after the first item of each
STOPPED = tl.constexpr(3)  # programs that have found no more items


@triton.jit
def _load_starts(cu_seqlens_q_ptr, stride_cu_q, row, num_rows, num_tokens):
    """Load the first token of each row, limited to 0 to `num_tokens`; 0 for the first row.

    A row that starts before the end of an earlier row is not legal; ``_load_rows`` checks this.
    """
    is_inside = (row > 0) & (row <= num_rows)
    given = tl.load(cu_seqlens_q_ptr + row * stride_cu_q, mask=is_inside, other=num_tokens)
    return tl.where(row > 0, tl.minimum(tl.maximum(given, 0), num_tokens), 0)


@triton.jit
def _load_rows(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, stride_cu_q, stride_cu_k, row, start, num_rows, num_tokens,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the first token, number of tokens, first key and number of keys of rows.

    `start` is the maximum of the results of ``_load_starts`` for a row and for all rows before it.

    Row `num_rows` is padding: it has the tokens past the last row, and no keys. Tokens at or past
    `num_tokens` are dropped; in causal rows their own keys are dropped too, which no other token
    sees. A row whose prefix sums do not ascend from 0 has no keys.
    """
    is_row = row < num_rows
    at = cu_seqlens_q_ptr + row * stride_cu_q
    given_start = tl.load(at, mask=is_row, other=num_tokens)
    given_end = tl.load(at + stride_cu_q, mask=is_row, other=num_tokens)
    end = tl.maximum(start, tl.minimum(given_end, num_tokens))
    at = cu_seqlens_k_ptr + row * stride_cu_k
    key_start = tl.load(at, mask=is_row, other=0)
    key_end = tl.load(at + stride_cu_k, mask=is_row, other=0)
    is_legal = (given_start >= 0) & (given_end >= given_start) & (key_start >= 0)
    is_legal &= (tl.minimum(given_start, num_tokens) == start) & (key_end <= _MOST_KEYS)
    is_legal &= key_end >= key_start
    key_len = tl.where(is_legal, key_end - key_start, 0)
    if CAUSAL:
        cut_off = tl.where(is_legal & is_row, (given_end - given_start) - (end - start), 0)
        # Without ``opaque`` the compiler negates `cut_off` in the sums above, in the form in which
        # ``sass.py`` looks for a sign that ptxas loses.
        key_len = tl.maximum(key_len - opaque(cut_off), 0)
    return start, end - start, key_start, key_len


@triton.jit
def _tiles_above(blocks, query_lens, key_lens, CAUSAL: tl.constexpr, TILE_M: tl.constexpr):
    """Return how many tiles of each row see more than `blocks` blocks; each sees at least one.

    Later tiles of a row see at least as many blocks as earlier ones, so these are the last tiles.
    """
    tiles = tl.cdiv(query_lens, TILE_M)
    keys = blocks * BLOCK_N
    fewer = 0
    if CAUSAL:
        fewer = tl.maximum(keys - (key_lens - query_lens), 0) // TILE_M
        fewer = tl.minimum(fewer, tl.maximum(tiles - 1, 0))
    above = tl.where(key_lens > keys, tiles - fewer, 0)
    return tl.where(blocks < 1, tiles, above)


@triton.jit
def _heads_of_group(
    num_tiles, num_keys, num_heads, num_programs, L2_KEYS: tl.constexpr, HEADS: tl.constexpr
):
    """Return the number of heads of a group.

    The limit is the number of heads whose keys fit in L2, or the number that gives all programs
    work, if this is larger. The result is the largest divisor of H up to this limit.
    """
    most = tl.maximum(L2_KEYS // tl.maximum(num_keys, 1), num_programs // tl.maximum(num_tiles, 1))
    heads = 1 + tl.arange(0, HEADS)
    return tl.max(tl.where((num_heads % heads == 0) & (heads <= most), heads, 1))


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_programs"])
def prefill_plan_kernel(
    cu_seqlens_q_ptr,  # int32 [B + 1]
    cu_seqlens_k_ptr,  # int32 [B + 1]
    tiles_ptr,  # out int32 [tiles, TILE_WORDS], see ``load_tile``
    work_ptr,  # out int32 [WORK_WORDS]
    stride_cu_q,
    stride_cu_k,
    num_rows,
    num_tokens,
    num_heads,
    num_programs,  # programs of the attend kernel that run at the same time
    CAUSAL: tl.constexpr,
    WRITES_EMPTY: tl.constexpr,  # rows without keys, and padding, have tiles too
    TILE_M: tl.constexpr,
    L2_KEYS: tl.constexpr,  # keys of one head that fit in L2 together with their values
    HEADS: tl.constexpr,  # power of two >= H
    ROWS: tl.constexpr,  # power of two > B
    TILES: tl.constexpr,  # tiles of a program
    OVERLAP: tl.constexpr,  # the attend kernel may start while this kernel still runs
):
    if OVERLAP:
        # The attend kernel waits for the end of this kernel, which starts after all earlier
        # kernels have ended.
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    given_starts = _load_starts(cu_seqlens_q_ptr, stride_cu_q, row, num_rows, num_tokens)
    starts = running_maximum(given_starts)
    _, query_lens, _, key_lens = _load_rows(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, stride_cu_q, stride_cu_k, row, starts, num_rows,
        num_tokens, CAUSAL,
    )  # fmt: skip
    if not WRITES_EMPTY:
        query_lens = tl.where(key_lens > 0, query_lens, 0)
    tile_ends = tl.cumsum(tl.cdiv(query_lens, TILE_M))
    num_tiles = tl.max(tile_ends)

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    exists = tile < num_tiles
    is_before = tile_ends[None, :] <= tile[:, None]
    owner = tl.minimum(tl.sum(is_before.to(tl.int32), axis=1), num_rows)
    index = tile - tl.max(tl.where(is_before, tile_ends[None, :], 0), axis=1)
    is_so_far = row[None, :] <= owner[:, None]
    start = tl.max(tl.where(is_so_far, given_starts[None, :], 0), axis=1)
    row_start, query_len, key_start, key_len = _load_rows(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, stride_cu_q, stride_cu_k, owner, start, num_rows,
        num_tokens, CAUSAL,
    )  # fmt: skip
    first = index * TILE_M
    last = tl.minimum(first + TILE_M, query_len)
    seen = key_len
    if CAUSAL:
        seen = key_len - query_len + last
    blocks = tl.maximum(tl.cdiv(seen, BLOCK_N), 1)

    # The tiles before a tile are those that see more blocks, and the earlier ones of those that see
    # the same number.
    above = _tiles_above(blocks[:, None], query_lens, key_lens, CAUSAL, TILE_M)
    no_fewer = _tiles_above(blocks[:, None] - 1, query_lens, key_lens, CAUSAL, TILE_M)
    in_front = above + tl.where(row[None, :] < owner[:, None], no_fewer - above, 0)
    in_row = _tiles_above(blocks - 1, query_len, key_len, CAUSAL, TILE_M)
    fewer = tl.cdiv(query_len, TILE_M) - in_row
    rank = tl.sum(in_front, axis=1) + index - fewer
    at = tiles_ptr + rank * TILE_WORDS
    tl.store(at + _TILE_TOKEN, row_start + first, mask=exists)
    tl.store(at + _TILE_COUNT, last - first, mask=exists)
    tl.store(at + _TILE_KEY_START, key_start, mask=exists)
    tl.store(at + _TILE_CONTEXT, key_len - query_len + first, mask=exists)
    tl.store(at + _TILE_KEY_LEN, key_len, mask=exists)

    if tl.program_id(0) == 0:
        num_keys = tl.sum(key_lens)
        heads = _heads_of_group(num_tiles, num_keys, num_heads, num_programs, L2_KEYS, HEADS)
        tl.store(work_ptr + _TILES, num_tiles)
        tl.store(work_ptr + _GROUP_HEADS, heads)
        tl.store(work_ptr + CLAIMED, 0)
        tl.store(work_ptr + STOPPED, 0)


@triton.jit
def load_work(work_ptr):
    """Return the number of query tiles, and the number of heads of a group."""
    return tl.load(work_ptr + _TILES), tl.load(work_ptr + _GROUP_HEADS)


@triton.jit
def find_item(num_tiles, group_heads, item, num_heads):
    """Return tile and head of an item; (-1, 0) for an item past the last one."""
    of_group = tl.maximum(num_tiles * group_heads, 1)
    group = item // of_group
    within = item - group * of_group
    tile = within // group_heads
    head = group * group_heads + within - tile * group_heads
    exists = item < num_tiles * num_heads
    return tl.where(exists, tile, -1), tl.where(exists, head, 0)


@triton.jit
def load_tile(tiles_ptr, tile, num_keys):
    """Return the record of a query tile; zeros if `tile` is negative.

    `num_keys` is the length of the tensors of keys. A row whose keys extend past it has no keys.

    Returns
    -------
    token, count
        First token of the tile, and its number of tokens, at least one.
    key_start, key_len
        First key of the row, and its number of keys.
    context
        Keys before the first token's own key; negative if tokens come before all keys.
    """
    at = tiles_ptr + tile * TILE_WORDS
    exists = tile >= 0
    token = tl.load(at + _TILE_TOKEN, mask=exists, other=0)
    count = tl.load(at + _TILE_COUNT, mask=exists, other=0)
    key_start = tl.load(at + _TILE_KEY_START, mask=exists, other=0)
    context = tl.load(at + _TILE_CONTEXT, mask=exists, other=0)
    key_len = tl.load(at + _TILE_KEY_LEN, mask=exists, other=0)
    fits = key_len <= num_keys - key_start
    key_len = tl.where(fits, key_len, 0)
    context = tl.where(fits, context, -_MOST_KEYS)
    return token, count, key_start, key_len, context
