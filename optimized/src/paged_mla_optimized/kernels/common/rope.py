"""Rotation of the last axis by a position's angles (rule S-12)."""

import triton
import triton.language as tl


@triton.jit
def load_halves(
    source_ptr,  # pointers to the rows, [ROWS]
    position,  # int64 [ROWS]
    live,  # bool [ROWS]
    cos_ptr,  # [max_model_len, P / 2], wider than the rows
    sin_ptr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
):
    """Load rows [ROWS, P], rotated in the type of the tables and rounded to their own.

    Returned are the two halves that :func:`store_halves` takes, each [ROWS, P / 2]: interleaved
    the even elements and the odd ones, otherwise the first and the last.
    """
    pair = tl.arange(0, P // 2)[None, :]
    column = tl.arange(0, P)[None, :]
    mask = live[:, None]
    if ROPE == "interleaved":  # whole rows, so that a thread's elements lie side by side
        rows = tl.load(source_ptr[:, None] + column, mask=mask)
        first, second = tl.split(tl.reshape(rows, [rows.shape[0], P // 2, 2]))
    else:
        first = tl.load(source_ptr[:, None] + pair, mask=mask)
        second = tl.load(source_ptr[:, None] + P // 2 + pair, mask=mask)
    if ROPE != "none":
        at = position[:, None] * (P // 2) + pair
        cos = tl.load(cos_ptr + at, mask=mask)
        sin = tl.load(sin_ptr + at, mask=mask)
        dtype = first.dtype
        first, second = first.to(cos.dtype), second.to(cos.dtype)
        turned = (first * cos - second * sin).to(dtype)
        second = (second * cos + first * sin).to(dtype)
        first = turned
    return first, second


@triton.jit
def store_halves(target_ptr, first, second, live, P: tl.constexpr, ROPE: tl.constexpr):
    """Store rows [ROWS, P], given by their halves, at pointers [ROWS]."""
    mask = live[:, None]
    if ROPE == "interleaved":
        rows = tl.interleave(first, second)
        tl.store(target_ptr[:, None] + tl.arange(0, P)[None, :], rows, mask=mask)
    else:
        pair = tl.arange(0, P // 2)[None, :]
        tl.store(target_ptr[:, None] + pair, first, mask=mask)
        tl.store(target_ptr[:, None] + P // 2 + pair, second, mask=mask)


@triton.jit
def copy_rotated(
    source_ptr, target_ptr, position, live, cos_ptr, sin_ptr, P: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Copy rows [ROWS, P] from pointers to pointers, rotated."""
    first, second = load_halves(source_ptr, position, live, cos_ptr, sin_ptr, P, ROPE)
    store_halves(target_ptr, first, second, live, P, ROPE)


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
        # The kernel behind begins once every program here has waited for the kernel before: all
        # that was launched earlier has ended by then, so keys may be read at once. What is
        # written below has to be waited for; nothing reads that buffer any more.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    live = pair < num_pairs
    token = (pair // num_heads).to(tl.int64)
    head = (pair % num_heads).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=live)
    source = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
    target = rotated_ptr + pair.to(tl.int64) * P
    copy_rotated(source, target, position, live, cos_ptr, sin_ptr, P, ROPE)
