"""A kernel that leaves NaN in the shared memory of the multiprocessors that it runs on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECE = 1024  # bytes; as many pieces as are asked for make up the whole


@gluon.jit
def fill_shared_memory(read_ptr, at, PIECES: gl.constexpr):
    """Fill all pieces with NaN and read one back, so that no compiler leaves the stores out."""
    WORDS: gl.constexpr = 256  # of 4 bytes, in a piece
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int32, [PIECES, WORDS], flat)
    nan = gl.full([WORDS], -1, gl.int32, lanes)  # in every type of floating point
    for piece in range(PIECES):
        memory.index(piece).store(nan)
    gl.store(read_ptr + gl.arange(0, WORDS, lanes), memory.index(at).load(lanes))
