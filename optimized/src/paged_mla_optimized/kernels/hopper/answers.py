"""Answers of products that unpack e4m3 values, on their way to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.hopper.e4m3 import in_order

_WARPS = gl.constexpr(8)


@constexpr_function
def lines_of(dtype):
    """Return how the warps share lines of answers, 16 bytes a thread."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [1, 32], [_WARPS, 1], [1, 0])


@gluon.jit
def store_columns(out, buffer, base_ptr, at, live, FIRST: gl.constexpr):
    """Store answers from column FIRST on, those of pair i at ``base_ptr + at[i]``.

    Through `buffer`: products leave 16 columns of a pair to eight threads, less than a line.
    """
    dtype: gl.constexpr = base_ptr.dtype.element_ty
    layout: gl.constexpr = lines_of(dtype)
    WIDTH: gl.constexpr = out.shape[0]
    PAIRS: gl.constexpr = out.shape[1]
    # Eight threads' columns, of every second pair, in banks of their own.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    lines = buffer._reinterpret(dtype, [PAIRS, WIDTH], swizzled)
    lines.store(in_order(out.to(dtype)))
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    gl.store(base_ptr + at[:, None] + column[None, :], lines.load(layout), mask=live[:, None])
