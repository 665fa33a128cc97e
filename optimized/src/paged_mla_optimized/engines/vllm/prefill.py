"""The prefill backend class: one layer's prefill rows, over keys and values of every head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from paged_mla_optimized.config.architectures import ARCHS
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.engines.fits import DTYPES
from paged_mla_optimized.engines.heads import HeadsPrefill, Keys, warm_up
from paged_mla_optimized.engines.vllm.registration import name_in
from paged_mla_optimized.engines.vllm.versions import context_chunk
from paged_mla_shared.errors import Unsupported


class PagedMlaPrefillBackend(MLAPrefillBackend):
    """Prefill for vLLM; ``attention_config={"mla_prefill_backend": "CUSTOM"}`` chooses it.

    vLLM projects, gathers contexts in chunks and merges their answers. Any backend may attend the
    decode rows beside it; ours hands keys over as they are projected.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=value)
        for nope, value in ((128, 128), (192, 256), (64, 128))  # of DeepSeek, GLM, Mistral
    ]

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enum."""
        return name_in(MLAPrefillBackendEnum)

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Return whether kernels are made for a device."""
        found = device_capability
        return found is not None and (found.major, found.minor) in ARCHS

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config = self._config()
        of_context = replace(config, causal=False)
        self._new, self._context = HeadsPrefill(config), HeadsPrefill(of_context)
        if torch.cuda.is_available():  # vLLM makes layers there; an interpreter compiles nothing
            device = torch.device("cuda", torch.cuda.current_device())
            warm_up(config, device)
            warm_up(of_context, device)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Begin a step."""
        super().prepare_metadata(prefill_metadata)
        self._new.forget()
        self._context.forget()

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Keys,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend rows to their new tokens. Our layers give `out`; vLLM does with a scale alone."""
        if output_scale is not None:
            raise Unsupported("quantized answers of prefill: supports_quant_output is False")
        starts = self._prefill_metadata.query_start_loc
        lse = _lse_of(q)
        answer = self._new.attend("new", starts, starts, q=q, k=k, v=v, lse=lse.t(), out=out)
        return (answer, lse) if return_softmax_lse else answer

    def run_prefill_context_chunk(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor | Keys,
        v: torch.Tensor,
        chunk_idx: int | None = None,
        chunk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend rows to a chunk of their cached context, all of which they see."""
        part = context_chunk(self._prefill_metadata, chunk_idx, chunk)
        lse = _lse_of(q)
        answer = self._context.attend(
            part.number, part.cu_seqlens_q, part.cu_seqlens_k, q=q, k=k, v=v, lse=lse.t()
        )
        return answer, lse

    def _config(self) -> PrefillConfig:
        scheduler = self.vllm_config.scheduler_config
        return PrefillConfig(
            num_heads=self.num_heads,
            softmax_scale=self.scale,
            max_rows=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.vllm_config.model_config.dtype,
        )


def _lse_of(q: torch.Tensor) -> torch.Tensor:
    """Return an lse of queries [T, H, N + P], to be filled: vLLM merges [H, T]."""
    tokens, num_heads, _ = q.shape
    return q.new_empty((num_heads, tokens), dtype=torch.float32)
