"""What two kernels share: one warpgroup weighs key tiles, two sum half of the latent columns each.

All barriers of such a kernel lie in one array, which begins with those of full slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.hopper.keys import copy_tile


@gluon.jit
def copy_half(keys, staged, slot, at, table_row_ptr, tile, seq_len, HALF: gl.constexpr):
    """Ask for one half of a key tile; the right one brings its k_pe."""
    ckv = staged.ckv.index(slot)
    WIDTH: gl.constexpr = ckv.shape[1] // 2
    FIRST: gl.constexpr = WIDTH * HALF
    copy_tile(
        keys, ckv.slice(FIRST, WIDTH, dim=1), staged.k_pe.index(slot),
        staged.bars.index(slot), at, table_row_ptr, tile, seq_len, 2 * WIDTH, FIRST, WIDTH,
        HALF == 1,
    )  # fmt: skip
