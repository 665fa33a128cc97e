"""Kernels that fill or read the shared memory of the multiprocessors on which they run."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECE = 1024  # bytes of a piece; the caller passes the number of pieces


@gluon.jit
def fill_shared_memory(read_ptr, at, PIECES: gl.constexpr, WORD: gl.constexpr):
    """Fill all pieces with a word and read one piece, so that the compiler keeps the stores."""
    WORDS: gl.constexpr = 256  # of 4 bytes, in a piece
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int32, [PIECES, WORDS], flat)
    words = gl.full([WORDS], WORD, gl.int32, lanes)
    for piece in range(PIECES):
        memory.index(piece).store(words)
    gl.store(read_ptr + gl.arange(0, WORDS, lanes), memory.index(at).load(lanes))


@gluon.jit
def read_shared_memory(read_ptr, at, PIECES: gl.constexpr):
    """Store, in each program, the sum of a piece that the program did not write."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.float32, [PIECES, 256], flat)
    gl.store(read_ptr + gl.program_id(0), gl.sum(memory.index(at).load(lanes), axis=0))
