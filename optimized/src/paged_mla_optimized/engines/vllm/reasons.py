"""Checks of vLLM's options, models and adapters. This file imports no vLLM."""

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
    """Return the reason why a model, its cache or a device is not supported, or ``None``.

    Parameters
    ----------
    head_size : int
        R + P, the width of a cached token.
    dtype : torch.dtype
        The model's dtype.
    kv_cache_dtype : str or None
        The value of ``--kv-cache-dtype``; ``None`` means ``auto``.
    capability : (int, int)
        The compute capability of the device.
    """
    reason = fits.misfit(head_size=head_size, dtype=dtype, capability=capability)
    if reason is not None:
        return f"paged_mla: {reason}"
    try:
        cache_format(kv_cache_dtype or "auto", dtype)
    except Unsupported as unsupported:
        return f"paged_mla: {unsupported}"
    return None


def refuse_variance(options: Options) -> None:
    """Check that no option makes the bits of a row depend on the other rows of its step.

    vLLM puts rows without cached tokens last. A short row of this kind counts as decode if only
    decode rows precede it; otherwise it goes through prefill. The other rows would thus decide
    which computation a short prompt gets.

    Raises
    ------
    Unsupported
        ``absorbed_query_len`` is above 1.
    """
    length = options.absorbed_query_len
    if length > 1:
        raise Unsupported(
            f"{KEY}.absorbed_query_len={length} is not supported with VLLM_BATCH_INVARIANT=1, "
            "because the other rows of a step would decide whether a short prompt counts as "
            "decode; use 1"
        )


def refuse_adapters(layers: Sequence[Any]) -> None:
    """Reject LoRA adapters of ``kv_b_proj``, which vLLM loads but never applies (vllm#48974).

    Up to 0.33 vLLM splits that weight for absorbed attention when it loads a model, and its
    prefill calls the layer without adapters. If LoRA is enabled, vLLM wraps every ``kv_b_proj``,
    also when no adapter changes it. An adapter of other modules never calls ``set_lora`` of this
    wrapper, and the adapter of vLLM's warm-up contains only zeros.

    Parameters
    ----------
    layers : sequence of MLAAttention
        The function replaces ``set_lora`` of each wrapped ``kv_b_proj``, so that an adapter that
        is loaded later raises ``Unsupported`` too.

    Raises
    ------
    Unsupported
        An adapter with weights other than 0 is already set.
    """
    for layer in layers:
        projection = getattr(layer, "kv_b_proj", None)
        set_lora = getattr(projection, "set_lora", None)
        if set_lora is None or isinstance(set_lora, partial):
            continue
        _refuse_weights(getattr(projection, "lora_b_stacked", ()))
        projection.set_lora = partial(_set_zeros, set_lora)  # type: ignore[union-attr]


def _set_zeros(set_lora: Any, index: int, lora_a: Any, lora_b: Any, *rest: Any) -> None:
    """Call `set_lora` if the weights `lora_b` are all 0, and raise ``Unsupported`` otherwise."""
    _refuse_weights(lora_b if isinstance(lora_b, (list, tuple)) else (lora_b,))
    set_lora(index, lora_a, lora_b, *rest)


def _refuse_weights(parts: Sequence[torch.Tensor | None]) -> None:
    if any(part is not None and bool(part.any()) for part in parts):
        raise Unsupported(
            "a LoRA adapter of kv_b_proj is not supported by paged_mla, because vLLM never applies "
            "it; train the adapter without that module, or merge it into the model"
        )
