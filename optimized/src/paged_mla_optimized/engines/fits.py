"""Limits of the kernels that are the same in every engine. This file imports no engine."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.architectures import ARCHS

DTYPES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (320, 576)
"""The supported values of R + P, for (R, P) = (256, 64) and (512, 64)."""


def misfit(*, head_size: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return the reason why a model or a device is not supported, or ``None`` if both are.

    Parameters
    ----------
    head_size : int
        R + P, the width of a cached token.
    dtype : torch.dtype
        The model's dtype.
    capability : (int, int)
        The compute capability of the device.
    """
    if capability not in ARCHS:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        return (
            f"compute capability {capability[0]}.{capability[1]} is not supported; "
            f"use a GPU of compute capability {known}"
        )
    if dtype not in DTYPES:
        return f"dtype {dtype} is not supported; use float16 or bfloat16"
    if head_size not in HEAD_SIZES:
        return (
            f"head_size={head_size} is not supported; use a model with head_size "
            f"{' or '.join(map(str, HEAD_SIZES))}"
        )
    return None
