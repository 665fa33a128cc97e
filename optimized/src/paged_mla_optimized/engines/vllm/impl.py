"""The implementation class, which computes the attention of one layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

from paged_mla_optimized.engines.heads import Keys
from paged_mla_optimized.engines.vllm.builder import PagedMlaMetadata
from paged_mla_optimized.engines.vllm.decode import Step
from paged_mla_optimized.engines.vllm.prefill import PagedMlaPrefillBackend
from paged_mla_shared.errors import Unsupported


class PagedMlaImpl(MLACommonImpl[PagedMlaMetadata]):
    """Compute the attention of one layer over vLLM's cache, without a copy of the cache.

    vLLM absorbs the queries, writes the cache and projects the outputs back. vLLM's own code also
    runs the prefill rows. With the prefill backend of this package two copies of that code are
    skipped: the backend reads one rotated key for all heads and writes directly to vLLM's output.

    Raises
    ------
    Unsupported
        The layer uses ALiBi, a sliding window, a soft cap or an attention type other than decoder.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False  # 0.33 assumes True without this attribute

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
        for name, value, feature in (
            ("alibi_slopes", alibi_slopes, "ALiBi"),
            ("sliding_window", sliding_window, "sliding-window attention"),
            ("logits_soft_cap", logits_soft_cap, "a soft cap of the logits"),
        ):
            if value:
                raise Unsupported(
                    f"{name}={value} is not supported by paged_mla; use a model without {feature}"
                )
        if attn_type != "decoder":
            raise Unsupported(
                f"attention type {attn_type!r} is not supported by paged_mla; "
                "only 'decoder' is supported"
            )
        self.supports_quant_query_input = False  # queries have 16 bits with FP8 caches too

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: PagedMlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs [T, H, R] and the lse [T, H] of the step's decode rows."""
        step: Step = attn_metadata.decode.step
        forward = get_forward_context() if is_forward_context_available() else None
        return step.attend(layer, q, kv_c_and_k_pe_cache, layer._k_scale, forward)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: PagedMlaMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Write the outputs of the step's prefill rows to `output` [T, H * V]."""
        prefill = attn_metadata.prefill
        attends = prefill.prefill_backend
        self._keys_stay_apart = isinstance(attends, PagedMlaPrefillBackend)
        if (
            not self._keys_stay_apart
            or prefill.chunked_context is not None
            or output_scale is not None
        ):
            super().forward_mha(
                q,
                kv_c_normed,
                k_pe,
                kv_c_and_k_pe_cache,
                attn_metadata,
                k_scale,
                output,
                output_scale,
            )
            return
        widths = [self.qk_nope_head_dim, self.v_head_dim]
        projected = self.kv_b_proj(kv_c_normed)[0].view(-1, self.num_heads, sum(widths))
        k_nope, v = projected.split(widths, dim=-1)
        attends.run_prefill_new_tokens(
            q,
            Keys(k_nope, k_pe),
            v,
            return_softmax_lse=False,
            out=output.view(-1, self.num_heads, self.v_head_dim),
        )

    def _concat_k_nope_k_pe(self, k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor | Keys:
        """Return the keys of all heads, without a copy if the prefill backend reads ``Keys``."""
        if self._keys_stay_apart:
            return Keys(k_nope, k_pe)
        joined: torch.Tensor = super()._concat_k_nope_k_pe(k_nope, k_pe)
        return joined
