"""GPU architectures that the kernels are compiled for; this module needs no torch and no Triton."""

from __future__ import annotations

ARCHS = {
    (8, 0): "sm80",
    (8, 6): "sm86",
    (8, 7): "sm86",
    (8, 9): "sm89",
    (9, 0): "sm90",
    (10, 0): "sm100",
    (10, 3): "sm100",
    (12, 0): "sm120",
    (12, 1): "sm120",
}
"""The name of the architecture of each compute capability."""

SHARED_MEMORY = {
    "sm80": 166_912,
    "sm86": 101_376,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm120": 101_376,
}
"""Bytes of shared memory that one program may use, by architecture."""

OVERLAPPING = frozenset({"sm90", "sm100", "sm120"})
"""Architectures on which a kernel can be launched while the kernel before it still runs."""

WITH_E4M3 = frozenset({"sm89", "sm90", "sm100", "sm120"})
"""Architectures that have an instruction to convert e4m3."""

ROUNDING_E4M3_ONCE = WITH_E4M3 - {"sm89"}
"""Architectures on which float32 is rounded to e4m3 once, as rule S-11 requires. On sm89, Triton
3.6 to 3.8 truncates to float16 before it rounds, so 0.4 % of the codes are one step too low."""

INTERPRETER = "interpreter"
"""The name of Triton's CPU interpreter where an architecture is expected."""
