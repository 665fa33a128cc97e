"""Unpack the e4m3 codes of a key tile to float16 operands in registers, which is exact.

A kernel loads a tile from shared memory as int16 elements of two neighboring latent columns each,
in the layout that the tensor cores require of 16-bit operands. The 8-bit columns of a thread are
then not in order. But their order costs nothing: a contraction may run over its columns in any
order, and the columns of outputs may be in another order until they are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl


@gluon.jit
def contracted(pairs):
    """Return the two float16 operands of keys ``[keys, columns / 2]`` for sums over columns.

    The first has columns (0, 1), (4, 5), ..., and the second has columns (2, 3), (6, 7), ... Both
    have the shape of `pairs`.
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


@constexpr_function
def value_words(words, keys, warps=8):
    """Return the layout of ``[columns / 2, keys]`` that ``values_of`` takes, for 4 or 8 warps."""
    along = [[0, 1 << i] for i in range(4, (keys - 1).bit_length())]
    across = [[1 << i, 0] for i in range(6 if warps == 8 else 5, (words - 1).bit_length())]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], *along, *across],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]][: 3 if warps == 8 else 2],
        block_bases=[],
        shape=[words, keys],
    )


@gluon.jit
def _times(x, y):
    """Return the product of float16 tensors, computed two elements at a time."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def values_of(words, layout: gl.constexpr, ratios=None):
    """Return the operand ``[columns, keys]`` of values ``[columns / 2, keys]`` in ``value_words``.

    The even columns of each 16 columns come first; ``in_order`` restores the order. The function
    multiplies the unpacked values by float16 `ratios` of the shape of `words`, if there are any.
    """
    WORDS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    even, uneven = gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 low, high; prmt.b32 t, $2, 0, 0x3120; mov.b32 {low, high}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [words],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    if ratios is not None:
        even = _times(even, ratios)
        uneven = _times(uneven, ratios)
    columns = gl.join(even, uneven).reshape([WORDS // 8, 8, KEYS, 2]).permute((0, 3, 1, 2))
    columns = columns.reshape([2 * WORDS, KEYS])
    return gl.convert_layout(columns, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def in_order(answers):
    """Return outputs ``[columns, pairs]`` as ``[pairs, columns]`` with the columns in order."""
    COLUMNS: gl.constexpr = answers.shape[0]
    PAIRS: gl.constexpr = answers.shape[1]
    answers = answers.reshape([COLUMNS // 16, 2, 8, PAIRS]).permute((3, 0, 2, 1))
    return answers.reshape([PAIRS, COLUMNS])
