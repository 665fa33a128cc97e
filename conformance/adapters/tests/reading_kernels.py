"""A kernel that reads shared memory which it has not written, as no kernel may."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def read_shared_memory(read_ptr, at, PIECES: gl.constexpr):
    """Store the sum of one piece of 256 words for each program."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.float32, [PIECES, 256], flat)
    gl.store(read_ptr + gl.program_id(0), gl.sum(memory.index(at).load(lanes), axis=0))
