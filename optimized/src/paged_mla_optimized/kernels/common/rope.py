"""Rotation of the last axis by a position's angles (rule S-12)."""

import triton
import triton.language as tl


@triton.jit
def copy_rotated(
    source_ptr,  # pointers to the rows, [ROWS]
    target_ptr,
    position,  # int64 [ROWS]
    live,  # bool [ROWS]
    cos_ptr,  # [max_model_len, P / 2], wider than the rows
    sin_ptr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "interleaved" or "neox"
):
    """Copy rows [ROWS, P], rotated in the type of the tables and rounded to their own."""
    pair = tl.arange(0, P // 2)[None, :]
    column = tl.arange(0, P)[None, :]
    mask = live[:, None]
    at = position[:, None] * (P // 2) + pair
    cos = tl.load(cos_ptr + at, mask=mask)
    sin = tl.load(sin_ptr + at, mask=mask)
    if ROPE == "interleaved":  # whole rows, so that a thread's elements lie side by side
        rows = tl.load(source_ptr[:, None] + column, mask=mask)
        first, second = tl.split(tl.reshape(rows, [rows.shape[0], P // 2, 2]))
    else:
        first = tl.load(source_ptr[:, None] + pair, mask=mask)
        second = tl.load(source_ptr[:, None] + P // 2 + pair, mask=mask)
    dtype = first.dtype
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    if ROPE == "interleaved":
        turned = tl.interleave(turned_first, turned_second)
        tl.store(target_ptr[:, None] + column, turned, mask=mask)
    else:
        tl.store(target_ptr[:, None] + pair, turned_first, mask=mask)
        tl.store(target_ptr[:, None] + P // 2 + pair, turned_second, mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def rotate_kernel(
    q_pe_ptr,  # [T, H, P]
    rotated_ptr,  # out [T, H, P], dense
    positions_ptr,  # int64 [T], 0 for padding
    cos_ptr,
    sin_ptr,
    stride_q_pe_token,
    stride_q_pe_head,
    num_pairs,  # T * H
    num_heads,
    P: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,  # launched while the kernel before still runs
):
    if OVERLAP:
        # The attend kernel waits for the end of this one alone. Because every program here waits
        # for the kernel before, that end comes after all that was launched earlier: what was
        # appended is there, and nothing reads the buffer any more that is written below.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    live = pair < num_pairs
    token = (pair // num_heads).to(tl.int64)
    head = (pair % num_heads).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=live)
    source = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
    target = rotated_ptr + pair.to(tl.int64) * P
    copy_rotated(source, target, position, live, cos_ptr, sin_ptr, P, ROPE)
