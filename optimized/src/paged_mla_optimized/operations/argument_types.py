"""Types of arguments that the kernels of several operations have."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.planning.families import TILE_FP8, AttendVariant
from paged_mla_optimized.runtime.kernel_spec import pointer


def cache_pointer(config: MlaConfig) -> str:
    """Return the type of a cache's address: that of latents, or bytes."""
    return pointer(torch.uint8 if config.is_fp8 else config.dtype)


def rope_pointer(config: MlaConfig) -> str:
    """Return the type of the rotation tables' addresses."""
    return "*fp64" if config.dtype == torch.float32 else "*fp32"


def partial_dtype(config: MlaConfig, variant: AttendVariant) -> torch.dtype:
    """Return the type of partial answers: float32, or where products are of FP8 that of answers.

    Such products round far more than that, and all programs leave their partials at once, as fast
    as memory takes them. With fixed splits the same buffer holds sums that others go on with.
    """
    is_rounded = variant.family == TILE_FP8 and not config.batch_invariant
    return config.dtype if is_rounded else torch.float32
