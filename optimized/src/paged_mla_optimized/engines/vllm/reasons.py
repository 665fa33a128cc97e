"""What these kernels do not serve, and why: no vLLM here."""

from __future__ import annotations

import torch

from paged_mla_optimized.engines.vllm.convert import cache_format
from paged_mla_optimized.runtime.device import ARCHS
from paged_mla_shared.errors import Unsupported

DTYPES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (320, 576)
"""R + P of (256, 64) and (512, 64)."""


def misfit(
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    capability: tuple[int, int],
) -> str | None:
    """Return why a model and a device are not served, or ``None``."""
    if capability not in ARCHS:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        return f"paged_mla: compute capability {capability[0]}.{capability[1]}: {known}"
    if dtype not in DTYPES:
        return f"paged_mla: dtype {dtype}: float16 or bfloat16"
    if head_size not in HEAD_SIZES:
        return f"paged_mla: head_size {head_size}: {' or '.join(map(str, HEAD_SIZES))}"
    try:
        cache_format(kv_cache_dtype or "auto", dtype)
    except Unsupported as reason:
        return f"paged_mla: {reason}"
    return None
