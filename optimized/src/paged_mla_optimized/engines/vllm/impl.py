"""The implementation class: one layer's decode rows. Its prefill rows are vLLM's own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

from paged_mla_optimized.engines.vllm.builder import PagedMlaMetadata
from paged_mla_optimized.engines.vllm.decode import Step
from paged_mla_shared.errors import Unsupported


class PagedMlaImpl(MLACommonImpl[PagedMlaMetadata]):
    """Attends to the cache as it lies; vLLM absorbs, writes the cache, and projects back."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
        ):
            if value:
                raise Unsupported(f"{name} {value}: none")
        if attn_type != "decoder":
            raise Unsupported(f"attention type {attn_type}: decoder")
        self.supports_quant_query_input = False  # queries of 16 bits over FP8 caches too

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: PagedMlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the step's decode rows."""
        step: Step = attn_metadata.decode.step
        return step.attend(layer, q, kv_c_and_k_pe_cache, layer._k_scale)
