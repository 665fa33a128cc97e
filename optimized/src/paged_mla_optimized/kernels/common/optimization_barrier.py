"""A value of which the compiler knows nothing: what follows from it is found where it is used.

What is the same in every pass of a loop is otherwise found once before all loops, and kept in
registers that the inner loops need, or in local memory.
"""

import triton
import triton.language as tl

from paged_mla_optimized.triton_compat.interpreter import is_compiled


@triton.jit
def opaque(value):
    """Return a `value` of 32 bits, or a tensor of them, as if it could be another each time."""
    if is_compiled():
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=1
        )
    return value
