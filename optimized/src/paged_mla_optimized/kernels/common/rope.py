"""Rotate rows by the angles of their positions (rule S-12).

``rotate_kernel`` rotates the queries for kernels that do not rotate them. Each program rotates
PAIRS pairs of token and head. The append kernels use the functions to rotate keys.
"""

import triton
import triton.language as tl


@triton.jit
def load_halves(
    source_ptr,  # pointers to the rows, [ROWS]
    position,  # int64 [ROWS]
    live,  # bool [ROWS]
    cos_ptr,  # [max_model_len, P / 2], of a wider type than the rows
    sin_ptr,  # [max_model_len, P / 2], of the same type
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
):
    """Load rows [ROWS, P] and rotate them if ROPE is not "none".

    The function rotates in the type of the tables, and rounds the results to the type of the rows.
    It returns the two halves that :func:`store_halves` takes, each [ROWS, P / 2]. With
    "interleaved" these are the even and the odd elements; otherwise the first and the last
    elements. The elements of rows that are not live are undefined.
    """
    pair = tl.arange(0, P // 2)[None, :]
    column = tl.arange(0, P)[None, :]
    mask = live[:, None]
    if ROPE == "interleaved":  # whole rows, so that the elements of a thread are contiguous
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
    """Store live rows [ROWS, P] at pointers [ROWS], from the halves of :func:`load_halves`."""
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
    """Load rows [ROWS, P] from pointers [ROWS], rotate them, and store them at other pointers."""
    first, second = load_halves(source_ptr, position, live, cos_ptr, sin_ptr, P, ROPE)
    store_halves(target_ptr, first, second, live, P, ROPE)


@triton.jit(do_not_specialize=["num_pairs"])
def rotate_kernel(
    q_pe_ptr,  # [T, H, P]
    rotated_ptr,  # out [T, H, P], dense
    positions_ptr,  # int64 [T], 0 for padding
    cos_ptr,  # [max_model_len, P / 2]
    sin_ptr,  # [max_model_len, P / 2]
    stride_q_pe_token,
    stride_q_pe_head,
    num_pairs,  # T * H
    num_heads,
    P: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,  # pairs of a program
    OVERLAP: tl.constexpr,  # this kernel starts while the kernel before it still runs
):
    if OVERLAP:
        # The next kernel starts after each program here has waited for the kernel before. All
        # earlier launches have ended by then, so the next kernel may read keys at once. It must
        # wait for this kernel before it reads the rotated queries. No earlier kernel still reads
        # the buffer that this kernel writes.
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
