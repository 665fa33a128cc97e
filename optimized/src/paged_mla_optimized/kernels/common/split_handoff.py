"""Hand over the sums of a split from one program to another, with splits of fixed length (S-20).

A cut between two programs may go through a split. The program after the cut starts the split. It
stores its intermediate sums, the *state* of the split, and sets a flag. The program before the cut
waits for this flag and continues from the state. The sums do not depend on the place of the cut.
The parts are in the grid in reverse order, so the program after the cut has the lower number.

Each role of a kernel has a flag of its own among the words of the program's share. The flag is 1
from the time when the state is stored until the other program takes it, and 0 between launches.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.schedule import SHARE_SOURCE, SHARE_STATES, share_of
from paged_mla_optimized.triton_compat.interpreter import is_compiled


@triton.jit
def state_of_program(program):
    """Return the first of the two partial query tiles in which a program stores its state."""
    return program * 2


@triton.jit
def leave_state(work, role, FIXED_SPLITS: tl.constexpr):
    """Set the flag of a role of this program: its state is stored.

    All threads of the role must have stored their part of the state before this call.
    """
    word_ptr = share_of(work, tl.program_id(0), FIXED_SPLITS) + SHARE_STATES + role
    if is_compiled():
        word_ptr = tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b64 $0, $1;", "=l,l", [word_ptr.to(tl.int64)], dtype=tl.int64,
            is_pure=False, pack=1,
        ).to(tl.pointer_type(tl.int64))  # fmt: skip
    tl.store(word_ptr, 1)


@triton.jit
def await_state(work, role, FIXED_SPLITS: tl.constexpr):
    """Wait for the state that a role continues from.

    Returns the program that stored the state, and the pointer to its flag. The wait cannot
    deadlock: a program that stores a state comes earlier in the grid, and it stores the state
    before it waits for another one.
    """
    source = tl.load(share_of(work, tl.program_id(0), FIXED_SPLITS) + SHARE_SOURCE).to(tl.int32)
    word_ptr = share_of(work, source, FIXED_SPLITS) + SHARE_STATES + role
    if is_compiled():
        # The branch is uniform for the whole warp. After a branch that can diverge, the compiler
        # keeps nothing in uniform registers, such as the descriptors of the operands of products.
        word_ptr = tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b64 said;
            again:
            ld.acquire.gpu.global.b64 said, [$1];
            setp.eq.b64 p, said, 0;
            vote.sync.any.pred p, p, 0xffffffff;
            @p bra.uni again;
            mov.b64 $0, $1;
            }""", "=l,l", [word_ptr.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1,
        ).to(tl.pointer_type(tl.int64))  # fmt: skip
    return source, word_ptr


@triton.jit
def forget_state(word_ptr):
    """Clear the flag for the next launch; all threads of the role must have seen it set."""
    tl.store(word_ptr, 0)
