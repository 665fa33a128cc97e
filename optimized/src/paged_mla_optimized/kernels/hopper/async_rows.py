"""Asynchronous copies of lines to shared memory by warps (``cp.async``)."""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.common.token_head import line_at
from paged_mla_optimized.kernels.hopper.pairs import query_pairs
from paged_mla_optimized.triton_compat.gluon_names import copy_elements


@constexpr_function
def lines_layout(threads, warps=4):
    """Return the layout of lines: `threads` threads for each line, with 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.jit
def copy_lines(
    base_ptr, at, exists, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Start to copy columns [FIRST, FIRST + WIDTH) of the lines at offsets `at`.

    Lines that do not exist become zeros.
    """
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    copy_elements(buffer, base_ptr + at[:, None] + column[None, :], mask=exists[:, None])


@gluon.jit
def copy_queries(step, segment, q, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Start to copy columns [FIRST, FIRST + WIDTH) of a query tile.

    Pairs that are not live become zeros.
    """
    layout: gl.constexpr = lines_layout(min(WIDTH // 8, 32))
    pairs = query_pairs(step, segment, gl.SliceLayout(1, layout))
    copy_lines(q.ptr, line_at(q, pairs.token, pairs.head), pairs.live, buffer, FIRST, WIDTH, layout)
