"""Rotation of the last axis by a position's angles (rule S-12)."""

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    row_ptr,  # pointers to the rows, [ROWS]
    position,  # int64 [ROWS]
    live,  # bool [ROWS]
    cos_ptr,  # [max_model_len, P / 2], wider than the rows
    sin_ptr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
):
    """Load rows [ROWS, P], rotated in the type of the tables and rounded to their own."""
    column = tl.arange(0, P)
    mask = live[:, None]
    x = tl.load(row_ptr[:, None] + column[None, :], mask=mask, other=0.0)
    if ROPE != "none":
        if ROPE == "interleaved":
            partner = column ^ 1
            angle = column // 2
            is_first = column % 2 == 0
        else:
            partner = (column + P // 2) % P
            angle = column % (P // 2)
            is_first = column < P // 2
        y = tl.load(row_ptr[:, None] + partner[None, :], mask=mask, other=0.0)
        at = position[:, None] * (P // 2) + angle[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
        sin = tl.where(is_first[None, :], -sin, sin)
        x = (x.to(cos.dtype) * cos + y.to(cos.dtype) * sin).to(x.dtype)
    return x
