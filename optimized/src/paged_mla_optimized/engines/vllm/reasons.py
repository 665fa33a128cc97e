"""What these kernels do not serve, and why: no vLLM here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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


def refuse_adapters(layers: Sequence[Any]) -> None:
    """Refuse LoRA of ``kv_b_proj``, which vLLM loads and then applies nowhere (vllm#48974).

    Up to 0.33 vLLM splits that weight for absorbed attention when it loads a model, and its
    prefill calls the layer that it had before adapters. Where LoRA is enabled, every such layer
    is wrapped, whatever adapters there will be; an adapter of other layers leaves it alone, and
    one that vLLM makes to warm up is of zeros.

    Parameters
    ----------
    layers : sequence of MLAAttention
        Adapters that come later are refused when they are set.

    Raises
    ------
    Unsupported
    """
    for layer in layers:
        projection = getattr(layer, "kv_b_proj", None)
        set_lora = getattr(projection, "set_lora", None)
        if set_lora is None or isinstance(set_lora, partial):
            continue
        _refuse_weights(getattr(projection, "lora_b_stacked", ()))
        projection.set_lora = partial(_set_zeros, set_lora)  # type: ignore[union-attr]


def _set_zeros(set_lora: Any, index: int, lora_a: Any, lora_b: Any, *rest: Any) -> None:
    _refuse_weights(lora_b if isinstance(lora_b, (list, tuple)) else (lora_b,))
    set_lora(index, lora_a, lora_b, *rest)


def _refuse_weights(parts: Sequence[torch.Tensor | None]) -> None:
    if any(part is not None and bool(part.any()) for part in parts):
        raise Unsupported(
            "paged_mla: a LoRA adapter of kv_b_proj, which vLLM applies nowhere: leave that module "
            "out of it, or merge it into the model"
        )
