"""The prefill backend class, which computes attention over per-head keys and values."""

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
    """Prefill for vLLM; ``attention_config={"mla_prefill_backend": "CUSTOM"}`` selects it.

    vLLM projects keys and values, gathers cached contexts in chunks and merges the partial results.
    This class works with every backend for decode rows. The decode backend of this package passes
    the keys as :class:`~paged_mla_optimized.engines.heads.Keys`, without a copy.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=value)
        for nope, value in ((128, 128), (192, 256), (64, 128))  # of DeepSeek, GLM, Mistral
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name of this backend's member in vLLM's enum."""
        return name_in(MLAPrefillBackendEnum)

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Return whether the kernels support a device's compute capability."""
        found = device_capability
        return found is not None and (found.major, found.minor) in ARCHS

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config = self._config()
        of_context = replace(config, causal=False)
        self._new, self._context = HeadsPrefill(config), HeadsPrefill(of_context)
        if torch.cuda.is_available():  # Triton's interpreter has nothing to compile
            device = torch.device("cuda", torch.cuda.current_device())
            warm_up(config, device)
            warm_up(of_context, device)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Start a new step, whose parts are planned again."""
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
        """Compute the attention of each row's new tokens over the row's new tokens.

        The decode backend of this package passes `out`. vLLM passes it only together with
        `output_scale`.

        Raises
        ------
        Unsupported
            `output_scale` is not ``None``.
        """
        if output_scale is not None:
            raise Unsupported(
                "output_scale is not supported by paged_mla: its prefill returns outputs that are "
                "not quantized; use another mla_prefill_backend"
            )
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
        """Compute the attention of new tokens over a chunk of their rows' cached context.

        The attention is not causal: every new token attends to every key of its row's chunk.
        """
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
    """Return an uninitialized lse for queries [T, H, N + P]: vLLM merges the layout [H, T]."""
    tokens, num_heads, _ = q.shape
    return q.new_empty((num_heads, tokens), dtype=torch.float32)
