"""Checks that raise ``Unsupported`` with a reason, for SGLang. This file imports no SGLang."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.errors import Unsupported


def common_scaling(layers: list[Any]) -> float:
    """Return the one softmax scale of all layers that attend over latents.

    Parameters
    ----------
    layers : list of RadixAttention

    Raises
    ------
    Unsupported
        There are no layers, the layers have different scales, or a layer has a logit cap, a sliding
        window or an attention type other than decoder.
    """
    if not layers:
        raise Unsupported(
            "a model without layers over latents is not supported by paged_mla; use an MLA model"
        )
    for layer in layers:
        if layer.logit_cap:
            raise Unsupported(
                f"logit_cap={layer.logit_cap} is not supported by paged_mla; "
                "use a model without a cap of the logits"
            )
        if layer.sliding_window_size > 0:
            raise Unsupported(
                f"sliding_window_size={layer.sliding_window_size} is not supported by paged_mla; "
                "use a model without sliding-window attention"
            )
        if layer.attn_type.value != "decoder":
            raise Unsupported(
                f"attention type {layer.attn_type.value!r} is not supported by paged_mla; "
                "only 'decoder' is supported"
            )
    found = {layer.scaling for layer in layers}
    if len(found) > 1:
        raise Unsupported(
            f"layers with different values of scaling, {sorted(found)}, are not supported by "
            "paged_mla; all layers must share one softmax scale"
        )
    return float(found.pop())


def refuse_extras(extras: dict[str, Any]) -> None:
    """Reject arguments that a layer passes in addition to queries, keys and values.

    Raises
    ------
    Unsupported
        An argument is not ``None``.
    """
    for name, value in extras.items():
        if value is not None:
            raise Unsupported(
                f"the attention argument {name} is not supported by paged_mla; use a model whose "
                "layers do not pass it"
            )


def refuse_mixed_scales(scales: set[float | None], backends: tuple[str, str]) -> None:
    """Reject an FP8 cache with a scale other than 1 if two backends write to it.

    Some of SGLang's backends do not divide by the scale when they write.

    Parameters
    ----------
    scales : set of float or None
        ``k_scale_float`` of the layers over latents.
    backends : (str, str)
        The names of the prefill backend and of the decode backend.

    Raises
    ------
    Unsupported
        A scale is not 1, and the two backends differ.
    """
    if scales - {None, 1.0} and len(set(backends)) > 1:
        found = sorted(scale for scale in scales if scale is not None)
        raise Unsupported(
            f"an FP8 cache with k_scale {found} cannot be shared by the attention backends "
            f"{' and '.join(backends)}; use one backend for prefill and decode, or k_scale 1"
        )


def refuse_variance(*, has_radix_cache: bool, chunked_prefill_size: int | None) -> None:
    """Reject options with which other requests decide where a prompt is split.

    The bits of a prompt's outputs depend on where the prompt is split.

    Parameters
    ----------
    has_radix_cache : bool
    chunked_prefill_size : int or None
        With -1 or ``None`` each prompt is processed whole, in a step without decode rows.

    Raises
    ------
    Unsupported
        There is a radix cache, or prompts are split into chunks.
    """
    if has_radix_cache:
        raise Unsupported(
            "deterministic inference cannot run with a radix cache in paged_mla; "
            "set disable_radix_cache=True"
        )
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        raise Unsupported(
            f"deterministic inference cannot run with chunked_prefill_size={chunked_prefill_size} "
            "in paged_mla; set it to -1"
        )
