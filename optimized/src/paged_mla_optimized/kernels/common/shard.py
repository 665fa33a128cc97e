"""What one rank of a divided cache does in a step, derived on the device (rules S-1, S-18).

Rank r of `WORLD` caches position p where ``(p // INTERLEAVE) % WORLD == r``. The keys that a query
sees are a prefix of the row's, so those on a rank are a prefix of the rank's, as long as
:func:`local_len` says. That bound is not the diagonal of a chunk, which is why every query token is
a row of its own.
"""

import triton
import triton.language as tl


@triton.jit
def local_len(seq_len, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return how many of a row's first `seq_len` tokens `rank` caches."""
    rounds = seq_len // (WORLD * INTERLEAVE)
    left = seq_len - rounds * (WORLD * INTERLEAVE)
    mine = tl.minimum(tl.maximum(left - rank * INTERLEAVE, 0), INTERLEAVE)
    return rounds * INTERLEAVE + mine


@triton.jit(do_not_specialize=["num_rows", "rank"])
def shard_kernel(
    cu_seqlens_q_ptr,  # int32 [B + 1]
    seq_lens_ptr,  # int32 [B], of all ranks together
    block_table_ptr,  # int32 [B, M]
    local_lens_ptr,  # out int32 [T]: keys of this rank that each query sees, 0 for padding
    positions_ptr,  # out int64 [T], of all ranks together; 0 for padding
    slot_mapping_ptr,  # out int64 [T]; -1 where another rank caches the token, and for padding
    table_ptr,  # out int32 [T, width]
    stride_cu,
    stride_lens,
    stride_table_row,
    stride_table_col,
    num_rows,
    rank,
    block_size,  # of this rank
    width,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= B
    ENTRIES: tl.constexpr,  # table entries that are copied at a time
):
    token = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    ends = tl.load(cu_seqlens_q_ptr + (rows + 1) * stride_cu, mask=is_row, other=2**31 - 1)
    row = tl.sum((ends <= token).to(tl.int32))
    is_live = row < num_rows
    end = tl.load(cu_seqlens_q_ptr + (row + 1) * stride_cu, mask=is_live, other=0)
    seq_len = tl.load(seq_lens_ptr + row * stride_lens, mask=is_live, other=0)
    is_live = is_live & (seq_len > 0)
    position = tl.where(is_live, seq_len - (end - token), 0)
    seen = tl.where(is_live, local_len(position + 1, rank, WORLD, INTERLEAVE), 0)
    tl.store(local_lens_ptr + token, seen)
    tl.store(positions_ptr + token, position.to(tl.int64))

    table_row_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
    is_mine = is_live & ((position // INTERLEAVE) % WORLD == rank)
    last = seen - 1  # index of the token itself among the rank's
    block = tl.load(table_row_ptr + last // block_size * stride_table_col, mask=is_mine, other=0)
    slot = block.to(tl.int64) * block_size + last % block_size
    tl.store(slot_mapping_ptr + token, tl.where(is_mine, slot, -1))

    used = tl.minimum(tl.cdiv(seen, block_size), width)
    for first in range(0, used, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        inside = entry < used
        blocks = tl.load(table_row_ptr + entry * stride_table_col, mask=inside, other=0)
        tl.store(table_ptr + token.to(tl.int64) * width + entry, blocks, mask=inside)
