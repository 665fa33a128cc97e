"""Launches split attention over its fixed grid, and joins what the grid cut."""

from __future__ import annotations

import math
from typing import Any

import torch

from paged_mla_optimized.checks import check_tensor
from paged_mla_optimized.config import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.kernels.portable.attend import attend_kernel
from paged_mla_optimized.launchers.combine import Combine, cut_constants
from paged_mla_optimized.launchers.hopper import HopperAttention
from paged_mla_optimized.planning.families import (
    PORTABLE,
    AttendVariant,
    attend_variant,
    fixed_splits,
    hopper_variant,
)
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_shared.errors import InvalidArgument


class Attention:
    """Workspace of the attention launches of one :class:`PagedMla`.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    num_sms : int
        Multiprocessors of the device; the grid has a fixed number of programs for each.
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2]; empty without rope.
    device : torch.device
    workspace : float32 [n] or None
        Where partial answers lie between two launches; ``None`` allocates.
    """

    def __init__(
        self,
        config: MlaConfig,
        variant: AttendVariant,
        num_sms: int,
        tables: tuple[torch.Tensor, torch.Tensor],
        device: torch.device,
        *,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.variant = variant
        self.tables = tables
        self.programs = variant.programs(num_sms)
        shape = (_tiles(config, variant, self.programs), variant.tile_m)
        pairs = math.prod(shape)
        size = pairs * (config.kv_lora_rank + 1)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=device)
        check_tensor("workspace", workspace, (None,), torch.float32, device, unit_stride=True)
        if len(workspace) < size:
            raise InvalidArgument("workspace", f"{len(workspace)} floats", f"at least {size}")
        self.workspace = workspace
        self.partial_out = workspace[: size - pairs].view(*shape, config.kv_lora_rank)
        self.partial_lse = workspace[size - pairs : size].view(shape)
        self._attend_kernel = Launcher(
            attend_kernel,
            attend_constants(config, variant),
            num_warps=variant.num_warps,
            num_stages=variant.num_stages,
        )
        self._combine = Combine(config, variant, self.programs)
        self._hopper = None
        if variant.family != PORTABLE:
            self._hopper = HopperAttention(config, variant, self.programs)

    def launch(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write every element of `out` and `lse`; T > 0."""
        self.attend(plan, q_nope, q_pe, cache, out=out, lse=lse)
        self._combine.launch(plan, self.partial_out, self.partial_lse, out=out, lse=lse)

    def attend(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write what no part of the grid cuts, and partials of what is cut."""
        if self._hopper is not None and (rows := self._hopper.rows_of(cache)) is not None:
            self._hopper.launch(
                rows,
                plan,
                q_nope,
                q_pe,
                cache,
                out=out,
                lse=lse,
                partial_out=self.partial_out,
                partial_lse=self.partial_lse,
            )
        else:
            self._attend_portable(plan, q_nope, q_pe, cache, out=out, lse=lse)

    def _attend_portable(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        config, table = self.config, plan.block_table
        strides = q_nope.stride(), q_pe.stride(), cache.stride(), table.stride(), out.stride()
        of_q_nope, of_q_pe, of_cache, of_table, of_out = strides
        self._attend_kernel(
            (self.programs, 1, 1),
            (of_q_nope, of_q_pe, of_cache, of_table[1], of_out),
            (
                q_nope,
                q_pe,
                cache,
                table,
                *plan.work,
                plan.positions,
                plan.tree_words,
                *self.tables,
                out,
                lse,
                self.partial_out,
                self.partial_lse,
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


def _tiles(config: MlaConfig, variant: AttendVariant, programs: int) -> int:
    """Return how many partial answers of a query tile the workspace holds."""
    if config.deterministic:
        return config.max_rows * fixed_splits(variant, config.max_rows, config.kv_lora_rank)
    return 2 * programs  # of the group that a part's range begins in, and of the one it ends in


def choose_variant(config: MlaConfig, arch: str) -> AttendVariant:
    """Return the fastest variant that serves every step of `config` on `arch`."""
    problem = (arch, DTYPE_NAMES[config.dtype], config.num_heads, config.tile_query_len)
    if config.rope is None:
        dims = (config.kv_lora_rank, config.qk_rope_head_dim)
        hopper = hopper_variant(*problem, dims)
        if hopper is not None:
            return hopper
    return attend_variant(*problem)


def attend_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what ``attend_kernel`` is specialised for."""
    return cut_constants(config, variant) | {
        "P": config.qk_rope_head_dim,
        "MASK": "tree" if config.is_tree else config.mask,
        "ROPE": config.rope_pairing,
        "TREE_WORDS": config.tree_words,
        "TILE_IN_BLOCK": config.block_size % variant.tile_n == 0,
    }
