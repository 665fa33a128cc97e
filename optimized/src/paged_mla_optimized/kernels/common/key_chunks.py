"""Keys of a step in parts that fit one workspace (rule S-21).

The first part has each row's own tokens. Then come the contexts, row after row and each backwards:
as many as the first part has room for, and as many as the workspace has lines in every part after
it. So a row's first part is the end of its keys, which is what causal attention wants, and what
follows is seen by all its queries.
"""

import triton
import triton.language as tl


@triton.jit
def _within(contexts, starts, position):
    """Return how many tokens of each row's context lie before a position of all contexts."""
    return tl.minimum(tl.maximum(position - starts, 0), contexts)


@triton.jit(
    do_not_specialize=["num_rows", "part", "room", "lines"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "seq_lens_ptr"],  # rows begin anywhere
)
def key_chunk_kernel(
    cu_seqlens_q_ptr,  # int32 [B + 1], of any start
    seq_lens_ptr,  # int32 [B]
    query_starts_ptr,  # out int32 [B + 1], from 0
    key_starts_ptr,  # out int32 [B + 1]
    first_tokens_ptr,  # out int32 [B]
    stride_cu_q,
    stride_lens,
    num_rows,
    part,
    room,  # lines of the workspace
    lines,  # that the host expects this part to fill, at most; keys past them are left out
    ROWS: tl.constexpr,  # power of two > B
):
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    at = cu_seqlens_q_ptr + row * stride_cu_q
    starts = tl.load(at, mask=row <= num_rows, other=0)
    query_lens = tl.load(at + stride_cu_q, mask=is_row, other=0) - starts
    query_lens = tl.where(is_row, query_lens, 0)
    seq_lens = tl.load(seq_lens_ptr + row * stride_lens, mask=is_row, other=0)
    own = tl.minimum(query_lens, seq_lens).to(tl.int64)
    contexts = tl.where(query_lens > 0, seq_lens - own, 0)
    before = tl.cumsum(contexts) - contexts
    begin = part.to(tl.int64) * room - tl.sum(own)
    end = begin + lines
    begin = tl.where(part > 0, begin, 0)
    taken = _within(contexts, before, begin)
    reached = _within(contexts, before, end)
    lens = reached - taken + tl.where(part > 0, 0, own)
    tl.store(query_starts_ptr + row, starts - tl.load(cu_seqlens_q_ptr), mask=row <= num_rows)
    key_starts = tl.minimum(tl.cumsum(lens) - lens, lines)
    tl.store(key_starts_ptr + row, key_starts, mask=row <= num_rows)
    tl.store(first_tokens_ptr + row, contexts - reached, mask=is_row)
