"""Check and launch the copy of cached latents to dense tensors, row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged_mla_optimized.config.architectures import INTERPRETER, WITH_E4M3
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.cache_layout import CacheLayout
from paged_mla_optimized.kernels.common.gather import gather_kernel
from paged_mla_optimized.operations.argument_types import cache_pointer
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.runtime.kernel_spec import DENSE, KernelSpec, number, pointer
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_optimized.runtime.layouts import known_layouts, layout_of
from paged_mla_optimized.tensors import checks
from paged_mla_optimized.tensors.latent_cache import LatentCache, named_tensors, scales_and_stride
from paged_mla_optimized.tensors.overlap import check_apart, check_places
from paged_mla_shared.errors import InvalidArgument

_MAX_KEYS = 2**31 - 1  # the largest int32 prefix sum
_TOKENS_PER_PROGRAM = 16
_TOKENS_INTERPRETED = 256  # an interpreted program has the same cost for any number of tokens


class Spans(NamedTuple):
    """The tokens of each row that are read.

    Parameters
    ----------
    block_table : int32 [B, M]
    key_starts : int32 [B + 1]
        Prefix sums of the number of tokens of each row, from 0; also the lines to write.
    first_tokens : int32 [B]
        The first token of each row that is read.
    """

    block_table: torch.Tensor
    key_starts: torch.Tensor
    first_tokens: torch.Tensor

    @classmethod
    def whole(cls, plan: Plan) -> Spans:
        """Return the spans of all tokens of the planned rows."""
        return cls(plan.block_table, plan.key_starts, plan.first_tokens)


class Gather:
    """The gather launch of one :class:`PagedMla`.

    Parameters
    ----------
    config : MlaConfig
    arch : str
        A name as in ``planning/families.py``.
    device : torch.device
    """

    def __init__(self, config: MlaConfig, arch: str, device: torch.device) -> None:
        self._config, self._device = config, device
        self._checked = known_layouts()
        spec = gather_spec(config, arch)
        self._tokens = spec.constants["TOKENS"]
        self._kernel = Launcher(spec)

    def read(
        self, spans: Spans, cache: LatentCache, *, ckv: torch.Tensor, k_pe: torch.Tensor
    ) -> None:
        """Check the arguments, and read the cached tokens of rows.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong, or an output overlaps an
            input.
        """
        layout = layout_of(ckv, k_pe, cache.latents, cache.scales, spans.block_table)
        if layout not in self._checked:
            self._check(spans, cache, ckv, k_pe)
            self._checked[layout] = None
        if ckv.shape[0] > 0 and len(spans.block_table) > 0:
            self.launch(spans, cache, ckv=ckv, k_pe=k_pe)

    def warm_up(self, plan: Plan, cache: LatentCache) -> None:
        """Launch the kernel for a planned step of padding."""
        config, device = self._config, self._device
        ckv, k_pe = (
            torch.zeros((1, width), dtype=config.dtype, device=device)
            for width in (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        self.read(Spans.whole(plan), cache, ckv=ckv, k_pe=k_pe)

    def _check(
        self, spans: Spans, cache: LatentCache, ckv: torch.Tensor, k_pe: torch.Tensor
    ) -> None:
        checks.check_latents(self._config, ckv, k_pe, None, self._device)
        check_places(ckv=ckv, k_pe=k_pe)
        if ckv.shape[0] > _MAX_KEYS:
            raise InvalidArgument("ckv", f"{ckv.shape[0]} lines", f"at most {_MAX_KEYS}")
        checks.check_cache(self._config, cache, self._device)
        read = spans._asdict() | named_tensors(cache)
        check_apart({"ckv": ckv, "k_pe": k_pe}, read)

    def launch(
        self, spans: Spans, cache: LatentCache, *, ckv: torch.Tensor, k_pe: torch.Tensor
    ) -> None:
        """Write the first ``key_starts[B]`` lines of `ckv` and `k_pe`; B and ``len(ckv)`` > 0."""
        capacity, latents, table = ckv.shape[0], cache.latents, spans.block_table
        scales, scales_stride = scales_and_stride(cache)
        of_table_row, of_table_column = table.stride()
        of_cache, of_ckv, of_k_pe = latents.stride(), ckv.stride(), k_pe.stride()
        self._kernel(
            (-(-capacity // self._tokens), 1, 1),
            (of_cache, scales_stride, of_table_column, of_ckv, of_k_pe),
            *(latents, scales, *spans, ckv, k_pe),
            *of_cache[:2],
            scales_stride,
            of_table_row,
            of_table_column,
            of_ckv[0],
            of_k_pe[0],
            table.shape[0],
            capacity,
            latents.shape[0],
            self._config.block_size,
        )


def gather_spec(config: MlaConfig, arch: str) -> KernelSpec:
    """Return the kernel that reads rows."""
    latent = pointer(config.dtype)
    types = {
        "cache_ptr": cache_pointer(config),
        "scales_ptr": "*fp32",
        "block_table_ptr": "*i32",
        "key_starts_ptr": "*i32",
        "first_tokens_ptr": "*i32",
        "ckv_ptr": latent,
        "k_pe_ptr": latent,
        "stride_scales_block": number(config.stored.scales_per_block(config.block_size)),
        "stride_table_col": DENSE,
        "block_size": number(config.block_size),
    }
    constants = {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "SCALES": config.scales,
        "SHARES": CacheLayout.of(config).scale_groups,
        "SEARCH_STEPS": config.search_steps,
        "TOKENS": _TOKENS_INTERPRETED if arch == INTERPRETER else _TOKENS_PER_PROGRAM,
        "NATIVE": arch in WITH_E4M3,
    }
    return KernelSpec(gather_kernel, constants, types)
