"""Divide the keys of a step into parts that each fit into one workspace (rule S-21).

The first part contains each row's own tokens, the keys of the query tokens. The contexts follow,
row after row, and each context from its end to its start: as many keys as the first part has
capacity for, and as many as the workspace has lines in every later part. So the first part of a row
is the end of its keys, as causal attention requires. All query tokens of the row see the keys of
the later parts.

The grid has one program. It writes the record of one `part`: the first query token and the first
workspace line of each row, and the first key of each row in this part. B is the number of rows.
"""

import triton
import triton.language as tl


@triton.jit
def _within(contexts, starts, position):
    """Return how many tokens of each row's context come before `position`.

    `position` counts the tokens of all contexts, which follow each other; `starts` are the
    positions of their first tokens.
    """
    return tl.minimum(tl.maximum(position - starts, 0), contexts)


@triton.jit(
    do_not_specialize=["num_rows", "part", "room", "lines"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "seq_lens_ptr"],  # slices of any offset
)
def key_chunk_kernel(
    cu_seqlens_q_ptr,  # int32 [B + 1]; the first entry may be any number
    seq_lens_ptr,  # int32 [B]
    query_starts_ptr,  # out int32 [B + 1]: `cu_seqlens_q` minus its first entry
    key_starts_ptr,  # out int32 [B + 1]: first workspace line of each row
    first_tokens_ptr,  # out int32 [B]: key on the first workspace line of each row
    stride_cu_q,
    stride_lens,
    num_rows,
    part,  # number of the part, from 0
    room,  # lines of the workspace
    lines,  # most lines that the host expects in this part; the kernel drops further keys
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
