"""Build the tables and lengths of multi-step drafts, and copy partly filled blocks (rule S-15).

Each request has k branches. The branches share the full blocks of the request's committed tokens
(its prefix), and have W blocks of their own for the other tokens. Row ``request * k + branch`` is
one branch.

* ``draft_rows_kernel``: program (row, chunk) writes ENTRIES entries of a row's block table. The
  programs of chunk 0 also write the row's lengths for each step.
* ``copy_tails_kernel``: program (row, chunk) copies TOKENS tokens of the last, partly filled prefix
  block to the first block of the branch, with their scales.
"""

import triton
import triton.language as tl


@triton.jit
def _load_prefix_len(prefix_lens_ptr, request, prefix_width, block_size):
    """Return the number of committed tokens of a request.

    It is 0 if the number is not positive or the prefix table is too narrow for it.
    """
    prefix_len = tl.load(prefix_lens_ptr + request)
    is_legal = (prefix_len > 0) & (tl.cdiv(prefix_len.to(tl.int64), block_size) <= prefix_width)
    return tl.where(is_legal, prefix_len, 0)


@triton.jit
def draft_rows_kernel(
    prefix_lens_ptr,  # int32 [B]
    prefix_table_ptr,  # int32 [B, M']
    branch_blocks_ptr,  # int32 [B, k, W], dense
    table_ptr,  # out int32 [B * k, M' + W], dense; -1 past a row's blocks
    seq_lens_ptr,  # out int32 [steps, B * k], dense; 0 for padded requests
    stride_table_row,
    stride_table_col,
    branches,  # k
    prefix_width,  # M'
    own_width,  # W
    steps,
    rows,  # B * k
    block_size,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // branches
    prefix_len = _load_prefix_len(prefix_lens_ptr, request, prefix_width, block_size)
    shared = prefix_len // block_size
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    own = entry - shared
    is_shared = entry < tl.minimum(shared, prefix_width)
    is_own = (own >= 0) & (own < own_width) & (prefix_len > 0)
    at = request.to(tl.int64) * stride_table_row + entry * stride_table_col
    block = tl.load(prefix_table_ptr + at, mask=is_shared, other=-1)
    mine = tl.load(branch_blocks_ptr + row * own_width + own, mask=is_own, other=-1)
    width = prefix_width + own_width
    at = row.to(tl.int64) * width + entry
    tl.store(table_ptr + at, tl.where(is_own, mine, block), mask=entry < width)
    if tl.program_id(1) == 0:
        for step in range(steps):
            seq_len = tl.where(prefix_len > 0, prefix_len + step + 1, 0)
            tl.store(seq_lens_ptr + step * rows + row, seq_len)


@triton.jit
def copy_tails_kernel(
    cache_ptr,  # [num_blocks, block_size, width], read and written
    scales_ptr,  # float32 [num_blocks, 1, SCALES], read and written if SCALES > 0
    prefix_lens_ptr,  # int32 [B]
    prefix_table_ptr,  # int32 [B, M']
    branch_blocks_ptr,  # int32 [B, k, W], dense
    stride_cache_block,
    stride_cache_token,
    stride_scales_block,
    stride_table_row,
    stride_table_col,
    branches,
    prefix_width,
    own_width,
    block_size,
    width,
    num_blocks,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two >= width
    SCALES: tl.constexpr,  # scales of a block; 0 if blocks have none
):
    row = tl.program_id(0)
    request = row // branches
    prefix_len = _load_prefix_len(prefix_lens_ptr, request, prefix_width, block_size)
    filled = prefix_len % block_size
    if tl.program_id(1) * TOKENS >= filled:
        return
    entry = request.to(tl.int64) * stride_table_row + prefix_len // block_size * stride_table_col
    from_block = tl.load(prefix_table_ptr + entry).to(tl.int64)
    to_block = tl.load(branch_blocks_ptr + row * own_width).to(tl.int64)
    is_cached = (from_block >= 0) & (from_block < num_blocks)
    is_cached &= (to_block >= 0) & (to_block < num_blocks)
    source = from_block * stride_cache_block
    target = to_block * stride_cache_block
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    at = token.to(tl.int64)[:, None] * stride_cache_token + column[None, :]
    is_copied = is_cached & (token < filled)
    mask = is_copied[:, None] & (column < width)[None, :]
    tl.store(cache_ptr + target + at, tl.load(cache_ptr + source + at, mask=mask), mask=mask)
    if SCALES > 0:
        at = token * SCALES // block_size
        scale = tl.load(scales_ptr + from_block * stride_scales_block + at, mask=is_copied)
        tl.store(scales_ptr + to_block * stride_scales_block + at, scale, mask=is_copied)
