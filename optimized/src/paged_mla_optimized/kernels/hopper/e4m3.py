"""e4m3 values of a key tile as float16 operands in registers, which is exact.

A tile is read from shared memory as int16, two neighbouring latent columns an element, in the
layout that the tensor cores want of 16-bit operands. What a thread then holds of 8-bit columns is
not in order, but orders that cost nothing serve as well: a contraction may run over its columns in
any order, and answers may be held as even and odd columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def contracted(pairs):
    """Unpack keys ``[keys, columns / 2]`` to be contracted over their columns.

    Returns columns (0, 1), (4, 5), ... and columns (2, 3), (6, 7), ..., float16, both as wide.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def transposed(pairs):
    """Unpack values ``[columns / 2, keys]``: the even columns and the odd ones, float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $2, 0, 0x3120; mov.b32 {low, high}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
