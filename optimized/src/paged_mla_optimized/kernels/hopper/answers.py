"""Store outputs of the kernels that unpack e4m3 values.

Such a kernel computes outputs transposed, [columns, pairs], with the columns in the order of
``values_of`` (``e4m3.py``). Eight warps store them through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.common.token_head import line_at, line_ptr
from paged_mla_optimized.kernels.hopper.e4m3 import in_order
from paged_mla_optimized.kernels.hopper.pairs import kept_pairs, partial_pairs, query_pairs
from paged_mla_optimized.triton_compat.gluon_names import read_as

_WARPS = gl.constexpr(8)


@constexpr_function
def _lines(dtype):
    """Return the layout in which the warps store lines of outputs: 16 bytes a thread."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [1, 32], [_WARPS, 1], [1, 0])


@gluon.jit
def _store_columns(out, buffer, base_ptr, at, live, FIRST: gl.constexpr):
    """Store outputs `out` [columns, pairs] from column FIRST on; pair i is at ``base_ptr + at[i]``.

    The data goes through `buffer` in shared memory: after a product, eight threads hold 16 columns
    of a pair, which is less than a line of memory.
    """
    dtype: gl.constexpr = base_ptr.dtype.element_ty
    layout: gl.constexpr = _lines(dtype)
    WIDTH: gl.constexpr = out.shape[0]
    PAIRS: gl.constexpr = out.shape[1]
    # For every second pair, the columns of eight threads are in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    lines = read_as(buffer, dtype, [PAIRS, WIDTH], swizzled)
    lines.store(in_order(out.to(dtype)))
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    gl.store(base_ptr + at[:, None] + column[None, :], lines.load(layout), mask=live[:, None])


@gluon.jit
def _store_whole(step, segment, parts, buffers, lse, answers):
    """Store out and lse of a query tile, in parts of columns, each through its own buffer."""
    layout: gl.constexpr = gl.SliceLayout(1, _lines(answers.out.ptr.dtype.element_ty))
    pairs = query_pairs(step, segment, layout)
    at = line_at(answers.out, pairs.token, pairs.head)
    for part in gl.static_range(len(parts)):
        first = part * parts[part].shape[0]
        _store_columns(parts[part], buffers[part], answers.out.ptr, at, pairs.live, first)
    lse_at = line_ptr(answers.lse, pairs.token, pairs.head)
    gl.store(lse_at, gl.convert_layout(lse, layout), mask=pairs.live)


@gluon.jit
def _store_partial(step, segment, parts, buffer, lse, answers):
    """Store the partial result of a query tile, in parts of columns, each through `buffer`."""
    layout: gl.constexpr = gl.SliceLayout(1, _lines(gl.float32))
    WIDTH: gl.constexpr = parts[0].shape[0]
    pair = partial_pairs(step, segment, layout)
    at = pair * (len(parts) * WIDTH)
    kept = kept_pairs(step, segment, layout)
    for part in gl.static_range(len(parts)):
        _store_columns(parts[part], buffer, answers.partial_out_ptr, at, kept, part * WIDTH)
    gl.store(answers.partial_lse_ptr + pair, gl.convert_layout(lse, layout), mask=kept)


@gluon.jit
def _buffers(parts, buffer):
    """Return a buffer for each part of outputs: the whole `buffer` [2, ...], or one half each."""
    if len(parts) == 1:
        buffers = (buffer,)
    else:
        buffers = (buffer.index(0), buffer.index(1))
    return buffers


@gluon.jit
def _halves(parts):
    """Return the columns in two parts, because the buffer has space for half of float32 outputs."""
    halves = parts
    if len(parts) == 1:
        out = parts[0]
        halves = out.reshape([2, out.shape[0] // 2, out.shape[1]]).permute((1, 2, 0)).split()
    return halves


@gluon.jit
def store_answers(step, segment, parts, buffer, lse, answers):
    """Store the outputs [R, pairs] of a query tile and their lse, or its partial result.

    `parts` is a tuple of one tensor, or of the lower and the upper columns. The outputs go through
    `buffer`, the buffer of the queries, which no product reads any more.
    """
    if segment.is_whole:
        _store_whole(step, segment, parts, _buffers(parts, buffer), lse, answers)
    else:
        _store_partial(step, segment, _halves(parts), buffer, lse, answers)
