"""What two kernels share: one warpgroup weighs key tiles, two sum half of the latent columns each.

All barriers of such a kernel lie in one array.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.hopper.keys import copy_tile


class Bars(NamedTuple):
    """Barriers of one meaning, which lie in an array from FIRST on."""

    array: gl.shared_memory_descriptor  # int64 [barriers of a kernel, 1]
    FIRST: gl.constexpr


@gluon.jit
def bars_in(array, SLOTS: gl.constexpr):
    """Return the barriers in an array: four meanings for each slot, then two that are single."""
    return (
        Bars(array, 0), Bars(array, SLOTS), Bars(array, 2 * SLOTS), Bars(array, 3 * SLOTS),
        Bars(array, 4 * SLOTS), Bars(array, 4 * SLOTS + 1),
    )  # fmt: skip


@gluon.jit
def bar_at(bars, slot=0):
    """Return the barrier of a slot, or the single one."""
    return bars.array.index(bars.FIRST + slot)


@gluon.jit
def copy_half(keys, staged, slot, at, table_row_ptr, tile, seq_len, HALF: gl.constexpr):
    """Ask for one half of a key tile; the right one brings its k_pe."""
    ckv = staged.ckv.index(slot)
    WIDTH: gl.constexpr = ckv.shape[1] // 2
    FIRST: gl.constexpr = WIDTH * HALF
    copy_tile(
        keys, ckv.slice(FIRST, WIDTH, dim=1), staged.k_pe.index(slot),
        bar_at(staged.bars.full, slot), at, table_row_ptr, tile, seq_len, 2 * WIDTH, FIRST, WIDTH,
        HALF == 1,
    )  # fmt: skip
