"""Launches the joining of partial answers: which programs, and how much each."""

from __future__ import annotations

from typing import Any

import torch

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.combine import combine_kernel
from paged_mla_optimized.launch import Launcher, aligned
from paged_mla_optimized.plan import Plan
from paged_mla_optimized.variants import PORTABLE, AttendVariant, fixed_splits

_WIDE_PAIRS = 1024
"""Up to so many pairs a program takes part of one, so that few rows are spread over the whole
device. Beyond it a program takes all columns of several pairs."""

_SHAPES = {"wide": {"PAIRS": 1, "COLUMNS": 128}, "tall": {"PAIRS": 4, "COLUMNS": 512}}
_SOURCES = 32


class Combine:
    """Launcher of ``combine_kernel``.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    parts : int
        Shares that the grid of the attend kernel cuts the work into.
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant, parts: int) -> None:
        self.config = config
        self.variant = variant
        self.parts = parts
        self._columns: dict[str, int] = {}
        self._kernels: dict[str, Launcher] = {}
        for shape in _SHAPES:
            constants = combine_constants(config, variant, shape)
            options = {"launch_pdl": True} if constants["OVERLAP"] else {}
            self._columns[shape] = constants["COLUMNS"]
            self._kernels[shape] = Launcher(combine_kernel, constants, **options)

    def launch(
        self,
        plan: Plan,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write what the groups that were cut come to, and blank padding; T > 0."""
        config, group_m = self.config, self.variant.group_m
        groups = self._groups(plan)
        joins = plan.num_rows * groups
        if joins > self.parts and not config.deterministic:
            joins, groups = self.parts, 0  # only so many groups can be cut
        shape = "wide" if groups > 0 and joins * group_m <= _WIDE_PAIRS else "tall"
        chunks = group_m // _SHAPES[shape]["PAIRS"]
        self._kernels[shape](
            (
                joins + -(-plan.num_tokens // chunks),
                chunks,
                config.kv_lora_rank // self._columns[shape],
            ),
            (groups, out.stride()) if aligned(out, lse) else None,
            plan.unit_starts,
            plan.token_starts,
            plan.row_lens,
            plan.slot_mapping,
            partial_out,
            partial_lse,
            out,
            lse,
            *out.stride()[:2],
            *lse.stride(),
            joins,
            groups,
            self.parts,
            plan.num_rows,
            plan.num_tokens,
            config.num_heads,
        )

    def _groups(self, plan: Plan) -> int:
        """Return how many groups of a row can be cut at most."""
        longest = min(self.config.max_query_len, plan.num_tokens)
        groups = -(-self.config.num_heads * longest // self.variant.group_m)
        if self.config.deterministic:
            splits = fixed_splits(self.variant, self.config.max_rows, self.config.kv_lora_rank)
            return max(1, min(groups, splits // 2))
        return groups


def cut_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what the attend and combine kernels must agree on."""
    splits = fixed_splits(variant, config.max_rows, config.kv_lora_rank)
    return {
        "R": config.kv_lora_rank,
        "TILE_M": variant.tile_m,
        "TILE_N": variant.tile_n,
        "LANES": variant.lanes,
        "MIN_UNITS": variant.min_units,
        "SPLIT_TILES": variant.split_tiles,
        "FIXED_SPLITS": splits if config.deterministic else 0,
        "SEARCH_STEPS": config.search_steps,
    }


def combine_constants(config: MlaConfig, variant: AttendVariant, shape: str) -> dict[str, Any]:
    """Return what ``combine_kernel`` is specialised for; `shape` is "wide" or "tall"."""
    constants = cut_constants(config, variant) | _SHAPES[shape]
    constants["COLUMNS"] = min(constants["COLUMNS"], config.kv_lora_rank)
    constants["SOURCES"] = _SOURCES
    constants["OVERLAP"] = variant.family != PORTABLE
    return constants
