"""What these kernels do not serve in SGLang, and why: no SGLang here."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.errors import Unsupported


def common_scaling(layers: list[Any]) -> float:
    """Return the softmax scale that all layers over latents have.

    Parameters
    ----------
    layers : list of RadixAttention

    Raises
    ------
    Unsupported
        They differ in it, or cap, window or encode.
    """
    if not layers:
        raise Unsupported("a model without layers over latents: one of MLA")
    for layer in layers:
        if layer.logit_cap:
            raise Unsupported(f"logit_cap {layer.logit_cap}: none")
        if layer.sliding_window_size > 0:
            raise Unsupported(f"sliding_window_size {layer.sliding_window_size}: none")
        if layer.attn_type.value != "decoder":
            raise Unsupported(f"attention type {layer.attn_type.value}: decoder")
    found = {layer.scaling for layer in layers}
    if len(found) > 1:
        raise Unsupported(f"layers with scaling {sorted(found)}: one for all")
    return float(found.pop())


def refuse_extras(extras: dict[str, Any]) -> None:
    """Refuse what a layer hands over beyond queries, keys and values.

    Raises
    ------
    Unsupported
    """
    for name, value in extras.items():
        if value is not None:
            raise Unsupported(f"{name}: dense attention without it")


def refuse_mixed_scales(scales: set[float | None], backends: tuple[str, str]) -> None:
    """Refuse an FP8 cache that two backends write: not all of SGLang's divide by a scale.

    Parameters
    ----------
    scales : set of float or None
        ``k_scale_float`` of layers over latents.
    backends : (str, str)
        Of prefill and of decode.

    Raises
    ------
    Unsupported
    """
    if scales - {None, 1.0} and len(set(backends)) > 1:
        found = sorted(scale for scale in scales if scale is not None)
        raise Unsupported(
            f"an FP8 cache with k_scale {found} beside attention backends "
            f"{' and '.join(backends)}: one for prefill and decode, or k_scale 1"
        )


def refuse_variance(*, has_radix_cache: bool, chunked_prefill_size: int | None) -> None:
    """Refuse what cuts a prompt where other requests decide: its bits follow from its cuts.

    Parameters
    ----------
    has_radix_cache : bool
    chunked_prefill_size : int or None
        -1 or ``None``: prompts are whole, and stand beside no decode rows.

    Raises
    ------
    Unsupported
    """
    if has_radix_cache:
        raise Unsupported("deterministic inference beside a radix cache: disable_radix_cache")
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        raise Unsupported(
            f"deterministic inference with chunked_prefill_size {chunked_prefill_size}: -1"
        )
