"""A barrier for the compiler's code motion.

The compiler hoists expressions that are the same in every iteration out of all loops. It then keeps
their values in registers that the inner loops need, or in local memory. It cannot hoist an
expression that uses an opaque value.
"""

import triton
import triton.language as tl

from paged_mla_optimized.triton_compat.interpreter import is_compiled


@triton.jit
def opaque(value):
    """Return `value`, a 32-bit scalar or tensor, so that the compiler cannot know its contents.

    The interpreter returns `value` itself.
    """
    if is_compiled():
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=1
        )
    return value
