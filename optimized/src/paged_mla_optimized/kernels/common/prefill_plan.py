"""Which query tile comes when in a prefill: the longest first, in groups of heads that fit in L2.

A *query tile* is TILE_M tokens of one row. `prefill_plan_kernel` writes one record for each, sorted
by the blocks of keys it sees, and an attend kernel works on each once for every head. An *item* is
one tile of one head. Items are counted group of heads by group of heads, then tile by tile, so that
keys and values of a group stay in L2 while all its tiles read them, and short tiles fill the gaps
that long ones leave. All groups have as many heads, since a last group of fewer would leave
programs without work at its end.

No tile is cut over its keys, and each belongs to one row: no row's bits depend on another row.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.optimization_barrier import opaque
from paged_mla_optimized.kernels.common.schedule import running_maximum

BLOCK_N = tl.constexpr(128)  # keys of a block, in which tiles are compared
_MOST_KEYS = tl.constexpr(2**30)  # of all rows: sums of two such numbers are within int32

# Words of a query tile.
TILE_WORDS = tl.constexpr(8)  # those past the last named one hold nothing
_TILE_TOKEN = tl.constexpr(0)
_TILE_COUNT = tl.constexpr(1)
_TILE_KEY_START = tl.constexpr(2)
_TILE_CONTEXT = tl.constexpr(3)
_TILE_KEY_LEN = tl.constexpr(4)

# Words of the work of a step.
WORK_WORDS = tl.constexpr(4)
_TILES = tl.constexpr(0)
_GROUP_HEADS = tl.constexpr(1)
CLAIMED = tl.constexpr(2)  # items, beyond the first of each program
STOPPED = tl.constexpr(3)  # programs that found no more items


@triton.jit
def _load_starts(cu_seqlens_q_ptr, stride_cu_q, row, num_rows, num_tokens):
    """Load where rows begin, between 0 and `num_tokens`; the first begins at 0, whatever it says.

    What does not begin at or after the end of all rows before it is no start, see `_load_rows`.
    """
    is_inside = (row > 0) & (row <= num_rows)
    given = tl.load(cu_seqlens_q_ptr + row * stride_cu_q, mask=is_inside, other=num_tokens)
    return tl.where(row > 0, tl.minimum(tl.maximum(given, 0), num_tokens), 0)


@triton.jit
def _load_rows(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, stride_cu_q, stride_cu_k, row, start, num_rows, num_tokens,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return of rows the first token, how many there are, the first key, and how many there are.

    `start` is the largest of what `_load_starts` returns for a row and for those before it.

    Row `num_rows` is padding: it has the tokens past the last row, and no keys. Tokens at or past
    `num_tokens` are cut off; of causal rows their own keys are too, which no other token sees. A
    row whose prefix sums do not ascend from 0 has no keys either.
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
        # Negated in the sums above, it would stand where ``sass.py`` looks for a sign that is lost.
        key_len = tl.maximum(key_len - opaque(cut_off), 0)
    return start, end - start, key_start, key_len


@triton.jit
def _tiles_above(blocks, query_lens, key_lens, CAUSAL: tl.constexpr, TILE_M: tl.constexpr):
    """Return how many tiles of each row see more than `blocks` blocks; each sees at least one.

    Later tiles of a row see more: the count is that of the tiles behind the first that does.
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
    """Return the heads of a group: as many as fit in L2, or as it takes to give all programs work.

    The largest divisor of H that is no more than that.
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
    num_programs,  # of the attend kernel that run at a time
    CAUSAL: tl.constexpr,
    WRITES_EMPTY: tl.constexpr,  # rows without keys, and padding, have tiles too
    TILE_M: tl.constexpr,
    L2_KEYS: tl.constexpr,  # of one head, with their values, that fit in L2
    HEADS: tl.constexpr,  # power of two >= H
    ROWS: tl.constexpr,  # power of two > B
    TILES: tl.constexpr,  # tiles of one program
    OVERLAP: tl.constexpr,  # the attend kernel may be launched while this one still runs
):
    if OVERLAP:  # it waits for the end of this one, which was launched after all before had ended
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

    # Before a tile come those that see more, and of those that see as much the ones in front.
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
    """Return how many query tiles there are, and how many heads a group has."""
    return tl.load(work_ptr + _TILES), tl.load(work_ptr + _GROUP_HEADS)


@triton.jit
def find_item(num_tiles, group_heads, item, num_heads):
    """Return tile and head of an item; (-1, 0) where there are no more."""
    of_group = tl.maximum(num_tiles * group_heads, 1)
    group = item // of_group
    within = item - group * of_group
    tile = within // group_heads
    head = group * group_heads + within - tile * group_heads
    exists = item < num_tiles * num_heads
    return tl.where(exists, tile, -1), tl.where(exists, head, 0)


@triton.jit
def load_tile(tiles_ptr, tile, num_keys):
    """Return what a query tile is; zeros where `tile` is negative.

    A row that goes on past `num_keys`, of the tensors of keys, has none.

    Returns
    -------
    token, count : its first token, and how many it has, at least one
    key_start, key_len : the keys of its row
    context : keys in front of its first token's own; negative where tokens come before all keys
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
