"""Launch the write of a step's latents to the paged cache."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton

from paged_mla_optimized.config.architectures import INTERPRETER, ROUNDING_E4M3_ONCE
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.cache_layout import CacheLayout
from paged_mla_optimized.kernels.common.append import append_kernel
from paged_mla_optimized.kernels.common.append_fp8 import append_fp8_kernel
from paged_mla_optimized.kernels.common.append_groups import append_groups_kernel
from paged_mla_optimized.kernels.common.append_runs import append_runs_kernel
from paged_mla_optimized.kernels.common.append_tokens import append_tokens_kernel
from paged_mla_optimized.operations.argument_types import cache_pointer, rope_pointer
from paged_mla_optimized.runtime.kernel_spec import DENSE, KernelSpec, number, pointer
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_optimized.tensors.latent_cache import LatentCache, scales_and_stride
from paged_mla_optimized.triton_compat.kernels import parameter_names
from paged_mla_shared.formats import GROUPS_PER_BLOCK

_TOKENS = 4  # tokens of a program
_WARPS = 4
_FP8_TOKENS = 2
_FP8_WARPS = 1
_SCALAR_WARPS = 2  # for formats with one scale per layer
_FEW_TOKENS = 512  # up to this many tokens of a step, a program has one token
_FEW_INTERPRETED = 0  # interpreted programs run one after another
_GROUP_TOKENS = 16  # for formats in which tokens share scales
_GROUP_WARPS = 8
_PLACES = 8
_SLOTS = 1024
RUN_TOKENS = (1, 3, 5)  # tokens of a program for consecutive slots; odd, to balance multiprocessors
_ROW_TOKENS = (4, 64)  # tokens per row above which programs have more tokens
_RUN_WARPS = 4
_ROWS = 4  # rows that are encoded together
_LONGEST_RUN = 32  # tokens; longer groups do not fit into registers


class Append:
    """The append launch of one :class:`PagedMla`.

    Parameters
    ----------
    config : MlaConfig
    arch : str
        A name as in ``planning/families.py``.
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2]; empty without rope.
    """

    def __init__(
        self, config: MlaConfig, arch: str, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.config = config
        self.tables = tables
        self._few_tokens = _FEW_INTERPRETED if arch == INTERPRETER else _FEW_TOKENS
        self._shares_scales = config.scales == "per_group"  # tokens share scales
        self._kernels = {
            (few, run_tokens): self._kernel(arch, few=few, run_tokens=run_tokens)
            for few, run_tokens in append_choices(config)
        }

    def _kernel(self, arch: str, *, few: bool, run_tokens: int) -> tuple[Launcher, int]:
        """Return the kernel, and the tokens of a program."""
        spec = append_spec(self.config, arch, few=few, run_tokens=run_tokens)
        return Launcher(spec), spec.constants["TOKENS"]

    def steps(self) -> list[tuple[int, int]]:
        """Return (tokens, rows) of a step for each kernel that the capacities allow.

        `rows` is 0 for a step whose slots the caller passes.
        """
        config = self.config
        found: dict[tuple[bool, int], tuple[int, int]] = {}
        for num_tokens in (1, self._few_tokens + 1):
            for num_rows in (0, *(-(-num_tokens // most) for most in _ROW_TOKENS), 1):
                found.setdefault(self._choice(num_tokens, num_rows), (num_tokens, num_rows))
        return [
            (num_tokens, num_rows)
            for num_tokens, num_rows in found.values()
            if num_tokens <= config.max_query_tokens and num_rows <= config.max_rows
        ]

    def _choice(self, num_tokens: int, planned_rows: int) -> tuple[bool, int]:
        """Return the element of ``append_choices`` for a step."""
        if not self._shares_scales:
            return False, 0
        few = num_tokens <= self._few_tokens
        return few, run_tokens_of(num_tokens, planned_rows, few=few)

    def launch(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: LatentCache,
        *,
        slot_mapping: torch.Tensor,
        planned_rows: int,
        positions: torch.Tensor,
    ) -> None:
        """Write the tokens whose slot is in the cache and not reserved (S-10); T > 0.

        `planned_rows` is the number of rows of the tokens if the slots are those of a plan, so that
        slots of a row are consecutive. It is 0 for other slots.
        """
        config, latents = self.config, cache.latents
        scales: tuple[torch.Tensor, ...] = ()
        of_scales: tuple[int, ...] = ()
        of_blocks: tuple[int, ...] = (config.block_size,)
        if config.is_fp8:
            tensor, stride = scales_and_stride(cache)
            scales, of_blocks = (tensor,), ()
            of_scales = (stride,) if config.scales in ("per_token", "per_group") else ()
        num_tokens = ckv.shape[0]
        strides = ckv.stride(), k_pe.stride(), latents.stride(), slot_mapping.stride()
        kernel, tokens = self._kernels[self._choice(num_tokens, planned_rows)]
        kernel(
            (-(-num_tokens // tokens), 1, 1),
            (*strides, of_scales),
            *(ckv, k_pe, latents, *scales, slot_mapping, positions, *self.tables),
            ckv.stride(0),
            k_pe.stride(0),
            slot_mapping.stride(0),
            *latents.stride()[:2],
            *of_scales,
            num_tokens,
            *of_blocks,
            latents.shape[0],
            -1 if config.reserved_slot is None else config.reserved_slot,
        )


def run_tokens_of(num_tokens: int, planned_rows: int, *, few: bool) -> int:
    """Return the tokens of a program that writes runs; 0 if the slots are not those of a plan."""
    if planned_rows == 0:
        return 0
    if few:
        return 1
    return RUN_TOKENS[sum(num_tokens > most * planned_rows for most in _ROW_TOKENS)]


def append_choices(config: MlaConfig) -> list[tuple[bool, int]]:
    """Return the arguments (few, run_tokens) of ``append_spec`` for all steps of a config."""
    if config.scales != "per_group":
        return [(False, 0)]
    return list(itertools.product((False, True), (0, *RUN_TOKENS)))


def append_spec(
    config: MlaConfig, arch: str, *, few: bool = False, run_tokens: int = 0
) -> KernelSpec:
    """Return the kernel that writes the config's format.

    In formats where tokens share scales, the kernel depends on whether a step has few tokens, and
    on the result of ``run_tokens_of``.
    """
    kernel, constants, warps = _kernel_of(config, arch, few=few, run_tokens=run_tokens)
    latent, table = pointer(config.dtype), rope_pointer(config)
    types = {
        "ckv_ptr": latent,
        "k_pe_ptr": latent,
        "cache_ptr": cache_pointer(config),
        "scales_ptr": "*fp32",
        "slot_mapping_ptr": "*i64",
        "positions_ptr": "*i64",
        "cos_ptr": table,
        "sin_ptr": table,
        "stride_slots": DENSE,
        "stride_scales_block": number(config.stored.scales_per_block(config.block_size)),
        "block_size": number(config.block_size),
    }
    taken = {name: types[name] for name in parameter_names(kernel) if name in types}
    return KernelSpec(kernel, constants, taken, {"num_warps": warps})


def _kernel_of(
    config: MlaConfig, arch: str, *, few: bool, run_tokens: int
) -> tuple[Any, dict[str, Any], int]:
    """Return the kernel that writes the config's format, its constants, and its warps."""
    constants: dict[str, Any] = {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "ROPE": config.rope_pairing,
    }
    if not config.is_fp8:
        return append_kernel, constants | {"TOKENS": _TOKENS}, _WARPS
    constants |= {"BLOCK_SIZE": config.block_size, "NATIVE": arch in ROUNDING_E4M3_ONCE}
    if config.scales == "per_group":
        size = config.block_size // GROUPS_PER_BLOCK
        if run_tokens > 0 and size <= _LONGEST_RUN:
            of_runs = {
                "TOKENS": run_tokens,
                "WINDOW": triton.next_power_of_2(run_tokens + size),
                "ROWS": _ROWS,
                "ALL_ROWS": triton.next_power_of_2(size),
            }
            return append_runs_kernel, constants | of_runs, _RUN_WARPS
        of_groups = {
            "PLANNED": run_tokens > 0,
            "TOKENS": 1 if few else _GROUP_TOKENS,
            "PLACES": _PLACES,
            "SLOTS": _SLOTS,
        }
        return append_groups_kernel, constants | of_groups, _GROUP_WARPS
    constants |= {"TOKENS": _FP8_TOKENS}
    if config.scales == "per_token":
        return append_tokens_kernel, constants, _FP8_WARPS
    of_format = {"SCALES": config.scales, "SHARES": CacheLayout.of(config).scale_groups}
    warps = _SCALAR_WARPS if config.scales == "scalar" else _FP8_WARPS
    return append_fp8_kernel, constants | of_format, warps
