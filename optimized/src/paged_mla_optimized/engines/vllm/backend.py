"""The backend class, which declares to vLLM what this package supports."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from paged_mla_optimized.config.architectures import ARCHS
from paged_mla_optimized.engines.fits import DTYPES, HEAD_SIZES
from paged_mla_optimized.engines.vllm.builder import PagedMlaMetadataBuilder
from paged_mla_optimized.engines.vllm.convert import KV_CACHE_DTYPES
from paged_mla_optimized.engines.vllm.impl import PagedMlaImpl
from paged_mla_optimized.engines.vllm.reasons import misfit
from paged_mla_optimized.engines.vllm.registration import name_in


class PagedMlaBackend(MLACommonBackend):
    """Dense MLA for vLLM.

    ``attention_backend="CUSTOM"`` selects it in every release, and ``"PAGED_MLA"`` also selects it
    in release 0.32 and later.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return the name of this backend's member in vLLM's enum."""
        return name_in(AttentionBackendEnum)

    @staticmethod
    def get_impl_cls() -> type[PagedMlaImpl]:
        """Return the class that computes the attention of one layer."""
        return PagedMlaImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMlaMetadataBuilder]:
        """Return the class that describes each step."""
        return PagedMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: Any = None,
    ) -> list[int | MultipleOf]:
        """Return the supported block sizes: every size is supported."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        """Return the order of the cache's axes in memory.

        With a dimension of layers the blocks come first, so that one block may span all layers.
        """
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the supported widths R + P of a cached token."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: the builder plans batch-invariant steps with ``VLLM_BATCH_INVARIANT=1``."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the kernels support a device's compute capability."""
        return (capability.major, capability.minor) in ARCHS

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return the reason why a model or a device is not supported, or ``None``."""
        capability = (device_capability.major, device_capability.minor)
        return misfit(
            head_size=head_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype, capability=capability
        )
