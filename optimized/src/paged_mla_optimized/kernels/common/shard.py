"""Derive the step of one rank on the device if ranks share the cache (rules S-1, S-18).

Rank r of `WORLD` caches position p if ``(p // INTERLEAVE) % WORLD == r``. A query sees a prefix of
its row's keys, so it sees a prefix of the keys that the rank caches. :func:`local_len` returns the
length of this prefix. It does not grow by one key from token to token, as a causal mask requires,
so each query token becomes a row of its own.

The grid has one program for each of the T tokens. It writes the token's local length, position,
slot and block table row.
"""

import triton
import triton.language as tl


@triton.jit
def local_len(seq_len, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return how many of the first `seq_len` tokens of a row `rank` caches."""
    rounds = seq_len // (WORLD * INTERLEAVE)
    left = seq_len - rounds * (WORLD * INTERLEAVE)
    mine = tl.minimum(tl.maximum(left - rank * INTERLEAVE, 0), INTERLEAVE)
    return rounds * INTERLEAVE + mine


@triton.jit
def _owner(
    cu_seqlens_q_ptr, seq_lens_ptr, stride_cu, stride_lens, num_rows, token, longest,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the row of a token, the end of this row's tokens, and its `seq_len`.

    The length is 0 if the token is padding, or if rule S-2 does not allow the row. As in
    ``plan.py``, a row that starts before the end of an earlier row is a padded row, for example.
    """
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    start_at = cu_seqlens_q_ptr + rows * stride_cu
    starts = tl.load(start_at, mask=is_row, other=0)
    ends = tl.load(start_at + stride_cu, mask=is_row, other=0)
    row = tl.min(tl.where(is_row & (ends > token), rows, num_rows))
    reached = tl.max(tl.where(rows < row, tl.maximum(starts, ends), 0))
    start = tl.load(cu_seqlens_q_ptr + row * stride_cu, mask=row < num_rows, other=0)
    end = tl.load(cu_seqlens_q_ptr + (row + 1) * stride_cu, mask=row < num_rows, other=0)
    seq_len = tl.load(seq_lens_ptr + row * stride_lens, mask=row < num_rows, other=0)
    is_legal = (start >= reached) & (start <= token) & (token < end)
    is_legal &= (seq_len >= end - start) & (seq_len <= longest)
    return row, end, tl.where(is_legal, seq_len, 0)


@triton.jit(do_not_specialize=["num_rows", "rank", "longest"])
def shard_kernel(
    cu_seqlens_q_ptr,  # int32 [B + 1]
    seq_lens_ptr,  # int32 [B], over all ranks
    block_table_ptr,  # int32 [B, M], of this rank
    local_lens_ptr,  # out int32 [T]: keys of this rank that each query sees, 0 for padding
    positions_ptr,  # out int64 [T]: position in the row over all ranks; 0 for padding
    slot_mapping_ptr,  # out int64 [T]; -1 if another rank caches the token, and for padding
    table_ptr,  # out int32 [T, width]: the blocks of the keys that each token sees
    stride_cu,
    stride_lens,
    stride_table_row,
    stride_table_col,
    num_rows,
    rank,
    block_size,  # tokens of a block on this rank
    width,
    longest,  # most tokens that the model and the block table allow in a row
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= B
    ENTRIES: tl.constexpr,  # table entries that are copied at a time
):
    token = tl.program_id(0)
    row, end, seq_len = _owner(
        cu_seqlens_q_ptr, seq_lens_ptr, stride_cu, stride_lens, num_rows, token, longest, ROWS
    )
    is_live = seq_len > 0
    position = tl.where(is_live, seq_len - (end - token), 0)
    seen = tl.where(is_live, local_len(position + 1, rank, WORLD, INTERLEAVE), 0)
    tl.store(local_lens_ptr + token, seen)
    tl.store(positions_ptr + token, position.to(tl.int64))

    table_row_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
    is_mine = is_live & ((position // INTERLEAVE) % WORLD == rank)
    last = seen - 1  # index of the token among those that the rank caches
    block = tl.load(table_row_ptr + last // block_size * stride_table_col, mask=is_mine, other=-1)
    slot = block.to(tl.int64) * block_size + last % block_size
    tl.store(slot_mapping_ptr + token, tl.where(block >= 0, slot, -1))

    used = tl.cdiv(seen, block_size)
    for first in range(0, used, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        inside = entry < used
        blocks = tl.load(table_row_ptr + entry * stride_table_col, mask=inside, other=0)
        tl.store(table_ptr + token.to(tl.int64) * width + entry, blocks, mask=inside)
