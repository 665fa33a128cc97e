"""Launches the portable attend kernel: any strides, any dims, any architecture."""

from __future__ import annotations

from typing import Any

import torch

from paged_mla_optimized.cache import LatentCache
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.portable.attend import attend_kernel
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_optimized.planning.plan import Plan, cut_constants
from paged_mla_optimized.runtime.launch import Launcher


class PortableAttention:
    """Launcher of ``attend_kernel``.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    programs : int
        Size of the grid.
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant, programs: int) -> None:
        self.config = config
        self.programs = programs
        self._kernel = Launcher(
            attend_kernel,
            attend_constants(config, variant),
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )

    def launch(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: LatentCache,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
    ) -> None:
        """Write `out` and `lse` of every whole group, and partials of the others."""
        config, latents, table = self.config, cache.latents, plan.block_table
        strides = q_nope.stride(), q_pe.stride(), latents.stride(), table.stride(), out.stride()
        of_q_nope, of_q_pe, of_cache, of_table, of_out = strides
        self._kernel(
            (self.programs, 1, 1),
            (of_q_nope, of_q_pe, of_cache, of_table[1], of_out),
            (
                q_nope,
                q_pe,
                latents,
                table,
                *plan.work,
                plan.tree_words,
                out,
                lse,
                partial_out,
                partial_lse,
            ),
            (
                *of_q_nope[:2],
                *of_q_pe[:2],
                *of_cache[:2],
                *of_table,
                *of_out[:2],
                *lse.stride(),
                config.softmax_scale,
                config.num_heads,
                config.block_size,
            ),
        )


def attend_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what ``attend_kernel`` is specialised for."""
    return cut_constants(config, variant) | {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "MASK": "tree" if config.is_tree else config.mask,
        "TREE_WORDS": config.tree_words,
        "TILE_IN_BLOCK": config.block_size % variant.tile_n == 0,
    }
