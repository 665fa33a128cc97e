"""Launches the portable attend kernel: any strides, any dims, any architecture."""

from __future__ import annotations

from typing import Any

import torch

from paged_mla_optimized.cache import LatentCache, scales_and_stride
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.portable.attend import attend_kernel
from paged_mla_optimized.launchers.rotate import RotateQueries
from paged_mla_optimized.planning.families import WITH_E4M3, AttendVariant
from paged_mla_optimized.planning.plan import Plan, cut_constants
from paged_mla_optimized.runtime.launch import Launcher

_SHARE = 128  # columns


class PortableAttention:
    """Launcher of ``attend_kernel``, and before it of what rotates its queries.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    arch : str
        As ``planning/families.py`` names it.
    programs : int
        Size of the grid.
    rotate : RotateQueries or None
        For a config with a rope.
    """

    def __init__(
        self,
        config: MlaConfig,
        variant: AttendVariant,
        *,
        arch: str,
        programs: int,
        rotate: RotateQueries | None,
    ) -> None:
        self.config = config
        self.programs = programs
        self._rotate = rotate
        self._kernel = Launcher(
            attend_kernel,
            attend_constants(config, variant, arch),
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
        if self._rotate is not None:
            q_pe = self._rotate.launch(q_pe, plan.positions)
        config, latents, table = self.config, cache.latents, plan.block_table
        scales, of_scales = scales_and_stride(cache)
        strides = q_nope.stride(), q_pe.stride(), latents.stride(), table.stride(), out.stride()
        of_q_nope, of_q_pe, of_cache, of_table, of_out = strides
        self._kernel(
            (self.programs, 1, 1),
            (of_q_nope, of_q_pe, of_cache, of_scales, of_table[1], of_out),
            (
                q_nope,
                q_pe,
                latents,
                scales,
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
                of_scales,
                *of_table,
                *of_out[:2],
                *lse.stride(),
                config.softmax_scale,
                config.num_heads,
                config.block_size,
                latents.shape[0],
            ),
        )


def attend_constants(config: MlaConfig, variant: AttendVariant, arch: str) -> dict[str, Any]:
    """Return what ``attend_kernel`` is specialised for."""
    return cut_constants(config, variant) | {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "SCALES": config.scales,
        "SHARES": _shares(config),
        "NATIVE": arch in WITH_E4M3,
        "MASK": "tree" if config.is_tree else config.mask,
        "TREE_WORDS": config.tree_words,
        "TILE_IN_BLOCK": config.block_size % variant.tile_n == 0,
    }


def _shares(config: MlaConfig) -> int:
    """Return how many parts latents come in: in one, FP8 tiles would not fit into registers."""
    if not config.is_fp8:
        return 1
    return config.stored.inline_scales or max(1, config.kv_lora_rank // _SHARE)
