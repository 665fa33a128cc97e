"""Triton argument types that the kernels of several operations share."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.planning.families import TILE_FP8, AttendVariant
from paged_mla_optimized.runtime.kernel_spec import pointer


def cache_pointer(config: MlaConfig) -> str:
    """Return the pointer type of a cache: the config's dtype, or bytes for FP8."""
    return pointer(torch.uint8 if config.is_fp8 else config.dtype)


def rope_pointer(config: MlaConfig) -> str:
    """Return the pointer type of the rotation tables."""
    return "*fp64" if config.dtype == torch.float32 else "*fp32"


def partial_dtype(config: MlaConfig, variant: AttendVariant) -> torch.dtype:
    """Return the dtype of partial results: float32, or the output dtype for FP8 products.

    FP8 products have a much larger rounding error than the output dtype. All their programs write
    partial results at the same time, at the speed of the memory. With fixed splits the same buffer
    also has sums that other programs continue; it is then float32 as well.
    """
    is_rounded = variant.family == TILE_FP8 and not config.batch_invariant
    return config.dtype if is_rounded else torch.float32
