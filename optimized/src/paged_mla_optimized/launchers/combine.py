"""Launches the joining of partial answers: how many programs."""

from __future__ import annotations

from typing import Any

import torch

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.common.combine import combine_kernel
from paged_mla_optimized.planning.families import PORTABLE, AttendVariant, fixed_splits
from paged_mla_optimized.planning.plan import Plan, split_constants
from paged_mla_optimized.runtime.device import is_interpreting
from paged_mla_optimized.runtime.launch import Launcher, overlap_options

_FIXED_WORKERS = 8  # programs for each query tile of a row that is cut by its own length


class Combine:
    """Launcher of ``combine_kernel``.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    programs : int
        Of the attend kernel: it has at most so many parts.
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant, programs: int) -> None:
        self.config = config
        self.variant = variant
        lanes = _least_lanes(config, variant)
        self.parts = programs // lanes
        # So many for each program of the attend kernel read all partials of its tile at once.
        workers = 8 if variant.tile_m <= 32 else 16
        self.workers = 2 if is_interpreting() else workers * lanes
        constants = combine_constants(config, variant)
        self._kernel = Launcher(combine_kernel, constants, **overlap_options(constants))

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
        joins, tiles, workers = self.parts, 1, self.workers
        if self.config.deterministic:
            # As many programs as else; at least one, which waits for the attend kernel.
            rows, programs = max(plan.num_rows, 1), joins * workers
            tiles = min(self._tiles(plan), max(programs // (rows * _FIXED_WORKERS), 1))
            joins = rows * tiles
            workers = max(programs // joins, 1)
        strides = out.stride()
        self._kernel(
            (joins + -(-plan.num_tokens // workers), workers, 1),
            strides,
            (
                plan.cut,
                plan.joins,
                plan.token_starts,
                plan.row_lens,
                plan.slot_mapping,
                partial_out,
                partial_lse,
                out,
                lse,
            ),
            (
                *strides[:2],
                *lse.stride(),
                joins,
                tiles,
                plan.num_tokens,
                self.config.num_heads,
            ),
        )

    def _tiles(self, plan: Plan) -> int:
        """Return how many programs share the query tiles of a row, each of which may join several.

        As many as fixed splits can cut in rows of the length that tiles are made for.
        """
        query_len = min(plan.query_len, plan.num_tokens)
        tiles = -(-self.config.num_heads * query_len // self.variant.tile_m)
        splits = fixed_splits(self.variant, self.config.max_rows, self.config.kv_lora_rank)
        return max(1, min(tiles, splits // 2))


def cut_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what the attend and combine kernels must agree on."""
    return {"R": config.kv_lora_rank} | split_constants(config, variant)


def combine_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what ``combine_kernel`` is specialised for."""
    return cut_constants(config, variant) | {"OVERLAP": variant.family != PORTABLE}


def _least_lanes(config: MlaConfig, variant: AttendVariant) -> int:
    """Return the fewest lanes that a plan takes: as many as one token fills."""
    fills = (1 << step for step in reversed(range(variant.lane_steps + 1)))
    return next(n for n in fills if n == 1 or config.num_heads % (n * variant.tile_m) == 0)
