"""The copy function of the decode kernels in which two warp groups sum half of the columns each.

In ``decode_tile.py`` and ``decode_tile_fp8.py`` one warp group computes the weights of key tiles,
and each of two others sums half of the latent columns. All barriers of such a kernel are in one
array, which starts with the barriers of full slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.hopper.keys import copy_tile


@gluon.jit
def copy_half(keys, staged, slot, at, table_row_ptr, tile, seq_len, HALF: gl.constexpr):
    """Start to copy the columns of one half of a key tile to `slot`; half 1 also copies k_pe.

    The copy arrives at the barrier of the full slot.
    """
    ckv = staged.ckv.index(slot)
    WIDTH: gl.constexpr = ckv.shape[1] // 2
    FIRST: gl.constexpr = WIDTH * HALF
    copy_tile(
        keys, ckv.slice(FIRST, WIDTH, dim=1), staged.k_pe.index(slot),
        staged.bars.index(slot), at, table_row_ptr, tile, seq_len, 2 * WIDTH, FIRST, WIDTH,
        HALF == 1,
    )  # fmt: skip
