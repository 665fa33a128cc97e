"""What these kernels do not serve in any engine, and why: no engine here."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.architectures import ARCHS

DTYPES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (320, 576)
"""R + P of (256, 64) and (512, 64)."""


def misfit(*, head_size: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why a model and a device are not served, or ``None``."""
    if capability not in ARCHS:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        return f"compute capability {capability[0]}.{capability[1]}: {known}"
    if dtype not in DTYPES:
        return f"dtype {dtype}: float16 or bfloat16"
    if head_size not in HEAD_SIZES:
        return f"head_size {head_size}: {' or '.join(map(str, HEAD_SIZES))}"
    return None
