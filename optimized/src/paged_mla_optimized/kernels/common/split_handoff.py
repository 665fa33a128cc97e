"""How one program goes on with the sums of another, with splits of fixed length (rule S-20).

A cut goes through a split: the program behind it begins the split, stores what it has come to, its
*state*, and says so; the program before it waits for that and goes on. What the sums are does not
depend on where the cut was.

Every role of a kernel has a word of the program's share for itself. It is 1 from when its state is
stored until it is taken, and 0 between launches.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.schedule import SHARE_SOURCE, SHARE_STATES, share_of
from paged_mla_optimized.triton_compat.interpreter import is_compiled


@triton.jit
def state_of_program(program):
    """Return the first of two partial query tiles in which a program leaves its state."""
    return program * 2


@triton.jit
def leave_state(work, role, FIXED_SPLITS: tl.constexpr):
    """Say that a role of this program has stored its state; all threads of it have."""
    word_ptr = share_of(work, tl.program_id(0), FIXED_SPLITS) + SHARE_STATES + role
    if is_compiled():
        word_ptr = tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b64 $0, $1;", "=l,l", [word_ptr.to(tl.int64)], dtype=tl.int64,
            is_pure=False, pack=1,
        ).to(tl.pointer_type(tl.int64))  # fmt: skip
    tl.store(word_ptr, 1)


@triton.jit
def await_state(work, role, FIXED_SPLITS: tl.constexpr):
    """Wait for the state that a role goes on with; return the program that left it.

    Programs that leave states begin with that, and come earlier in the grid: they never wait.
    """
    source = tl.load(share_of(work, tl.program_id(0), FIXED_SPLITS) + SHARE_SOURCE).to(tl.int32)
    word_ptr = share_of(work, source, FIXED_SPLITS) + SHARE_STATES + role
    if is_compiled():
        # One branch of a whole warp: after one that threads could take apart, the compiler would
        # keep nothing in uniform registers, such as what describes operands of products.
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
    """Make ready for the next launch; all threads of the role have seen the word."""
    tl.store(word_ptr, 0)
