"""Launches the paged scatter of a step's latents."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.cache import LatentCache
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.common.append import append_kernel
from paged_mla_optimized.runtime.launch import Launcher

_TOKENS_PER_PROGRAM = 4


class Append:
    """The append launch of one :class:`PagedMla`.

    Parameters
    ----------
    config : MlaConfig
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2]; empty without rope.
    """

    def __init__(self, config: MlaConfig, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.config = config
        self.tables = tables
        self._kernel = Launcher(append_kernel, append_constants(config))

    def launch(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: LatentCache,
        *,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Write the rows of tokens whose slot is neither negative nor reserved (S-10); T > 0."""
        config, latents = self.config, cache.latents
        num_tokens = ckv.shape[0]
        self._kernel(
            (triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM), 1, 1),
            (ckv.stride(), k_pe.stride(), latents.stride(), slot_mapping.stride()),
            (
                ckv,
                k_pe,
                latents,
                slot_mapping,
                positions,
                *self.tables,
            ),
            (
                ckv.stride(0),
                k_pe.stride(0),
                slot_mapping.stride(0),
                *latents.stride()[:2],
                num_tokens,
                config.block_size,
                -1 if config.reserved_slot is None else config.reserved_slot,
            ),
        )


def append_constants(config: MlaConfig) -> dict[str, Any]:
    """Return what ``append_kernel`` is specialised for."""
    return {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "ROPE": config.rope_pairing,
        "TOKENS": _TOKENS_PER_PROGRAM,
    }
