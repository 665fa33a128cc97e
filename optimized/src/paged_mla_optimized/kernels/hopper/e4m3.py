"""e4m3 values of a key tile as float16 operands in registers, which is exact.

A tile is read from shared memory as int16, two neighbouring latent columns an element, in the
layout that the tensor cores want of 16-bit operands. What a thread then holds of 8-bit columns is
not in order, but orders that cost nothing serve as well: a contraction may run over its columns in
any order, and answers may be held in another, until they are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
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


@constexpr_function
def value_words(words, keys, warps=8):
    """Return the layout of ``[columns / 2, keys]`` that ``values_of`` takes from so many warps."""
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
    """Multiply float16 tensors, two elements at a time."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def values_of(words, layout: gl.constexpr, ratios=None):
    """Unpack values ``[columns / 2, keys]``, in ``value_words``, to an operand ``[columns, keys]``.

    Of each 16 columns the even ones come first; ``in_order`` undoes that. Float16 `ratios`, of
    pairs of columns as `words` are, multiply what is unpacked.
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
    """Return answers ``[columns, pairs]`` as ``[pairs, columns]``, columns in order."""
    COLUMNS: gl.constexpr = answers.shape[0]
    PAIRS: gl.constexpr = answers.shape[1]
    answers = answers.reshape([COLUMNS // 16, 2, 8, PAIRS]).permute((3, 0, 2, 1))
    return answers.reshape([PAIRS, COLUMNS])
