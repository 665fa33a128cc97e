"""Launches the paged scatter of a step's latents."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.append import append_kernel

_TOKENS_PER_PROGRAM = 4


def launch_append(
    config: MlaConfig,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    *,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write the rows of every token whose slot is neither negative nor reserved (S-10); T > 0."""
    num_tokens = ckv.shape[0]
    append_kernel[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)](
        ckv,
        k_pe,
        cache,
        slot_mapping,
        positions,
        *tables,
        ckv.stride(0),
        k_pe.stride(0),
        slot_mapping.stride(0),
        *cache.stride()[:2],
        num_tokens,
        config.block_size,
        -1 if config.reserved_slot is None else config.reserved_slot,
        **append_constants(config),
    )


def append_constants(config: MlaConfig) -> dict[str, Any]:
    """Return what ``append_kernel`` is specialised for."""
    return {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "ROPE": config.rope_pairing,
        "TOKENS": _TOKENS_PER_PROGRAM,
    }
