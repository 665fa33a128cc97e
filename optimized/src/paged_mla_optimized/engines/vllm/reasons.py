"""What these kernels do not serve, and why: no vLLM here."""

from __future__ import annotations

import torch

from paged_mla_optimized.engines import fits
from paged_mla_optimized.engines.vllm.convert import cache_format
from paged_mla_optimized.engines.vllm.options import KEY, Options
from paged_mla_shared.errors import Unsupported


def misfit(
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    capability: tuple[int, int],
) -> str | None:
    """Return why a model and a device are not served, or ``None``."""
    reason = fits.misfit(head_size=head_size, dtype=dtype, capability=capability)
    if reason is not None:
        return f"paged_mla: {reason}"
    try:
        cache_format(kv_cache_dtype or "auto", dtype)
    except Unsupported as unsupported:
        return f"paged_mla: {unsupported}"
    return None


def refuse_variance(options: Options) -> None:
    """Refuse what lets a row's bits depend on the rows beside it.

    vLLM puts rows that have nothing cached last. Short ones count as decode where only such stand
    before them, and else go over keys and values of every head.

    Raises
    ------
    Unsupported
    """
    length = options.absorbed_query_len
    if length > 1:
        raise Unsupported(
            f"{KEY}.absorbed_query_len {length} beside VLLM_BATCH_INVARIANT: 1, or rows beside a "
            "short prompt decide which way it goes"
        )
