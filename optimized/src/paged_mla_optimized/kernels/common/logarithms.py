"""What turns natural logarithms to those in base 2, which a device has, and back."""

import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
