"""Code of all commands that launch kernels: the GPU, and the config of an instance."""

from __future__ import annotations

import torch

from paged_mla_optimized.commands.configuration import Configuration
from paged_mla_optimized.config.attention import TORCH_DTYPES, MlaConfig
from paged_mla_shared.errors import Unsupported


def current_gpu() -> torch.device:
    """Return the current GPU, on which kernels are launched.

    Raises
    ------
    Unsupported
        torch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise Unsupported("torch finds no GPU; run paged-mla doctor to see what is missing")
    return torch.device("cuda", torch.cuda.current_device())


def config_of(
    configuration: Configuration,
    num_heads: int | None,
    *,
    max_rows: int,
    max_query_tokens: int,
    max_model_len: int,
) -> MlaConfig:
    """Return the config of an instance; with ``None``, `num_heads` is that of the model.

    Raises
    ------
    InvalidArgument, Unsupported
        The errors of :class:`MlaConfig`.
    """
    dims = configuration.dims
    return MlaConfig(
        num_heads=num_heads or dims.num_heads,
        softmax_scale=dims.softmax_scale,
        block_size=configuration.block_size,
        max_rows=max_rows,
        max_query_tokens=max_query_tokens,
        max_model_len=max_model_len,
        kv_lora_rank=dims.kv_lora_rank,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        dtype=TORCH_DTYPES[configuration.dtype],
        cache_format=configuration.cache_format,
        products=configuration.products,
    )
