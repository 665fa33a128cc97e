"""Launch the portable attend kernel, which supports any strides, sizes and architecture."""

from __future__ import annotations

from paged_mla_optimized.config.architectures import WITH_E4M3
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.token_head import Lines, Partials
from paged_mla_optimized.kernels.portable.attend import attend_kernel
from paged_mla_optimized.operations.argument_types import cache_pointer, partial_dtype
from paged_mla_optimized.operations.queries.rotate import RotateQueries
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_optimized.planning.plan import WORK_TYPES, Plan, tiles_of
from paged_mla_optimized.runtime.kernel_spec import DENSE, STRIDE, KernelSpec, number, pointer
from paged_mla_optimized.runtime.launch import Fixed, Launcher
from paged_mla_optimized.tensors.latent_cache import LatentCache, scales_and_stride
from paged_mla_optimized.tensors.queries import Answer, Queries

_SHARE = 128  # latent columns


class PortableAttention:
    """Launcher of ``attend_kernel`` and, with a rope, of the rotation of its queries.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    arch : str
        A name as in ``planning/families.py``.
    programs : int
        Size of the grid.
    rotate : RotateQueries or None
        The rotation; required if the config has a rope.
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
        self._kernel = Launcher(attend_spec(config, variant, arch))

    def launch(
        self,
        plan: Plan,
        queries: Queries,
        cache: LatentCache,
        answer: Answer,
        *,
        partials: Fixed,
    ) -> None:
        """Write `answer` for groups that are not split, and `partials` for all others."""
        (q_nope, q_pe), (out, lse) = queries, answer
        if self._rotate is not None:
            q_pe = self._rotate.launch(q_pe, plan.positions)
        config, latents, table = self.config, cache.latents, plan.block_table
        scales, of_scales = scales_and_stride(cache)
        strides = q_nope.stride(), q_pe.stride(), latents.stride(), table.stride(), out.stride()
        of_q_nope, of_q_pe, of_cache, of_table, of_out = strides
        self._kernel(
            (self.programs, 1, 1),
            (of_q_nope, of_q_pe, of_cache, of_scales, of_table[1], of_out),
            plan.work,
            (q_nope, *of_q_nope[:2]),
            (q_pe, *of_q_pe[:2]),
            latents,
            *of_cache[:2],
            scales,
            of_scales,
            table,
            *of_table,
            latents.shape[0],
            config.block_size,
            config.num_heads,
            (out, *of_out[:2]),
            lse,
            *lse.stride(),
            partials,
            config.softmax_scale,
        )


def attend_spec(config: MlaConfig, variant: AttendVariant, arch: str) -> KernelSpec:
    """Return the portable attend kernel."""
    lines = Lines(pointer(config.dtype), STRIDE, STRIDE)
    types = {
        "work": WORK_TYPES,
        "q_nope": lines,
        "q_pe": lines,
        "cache_ptr": cache_pointer(config),
        "scales_ptr": "*fp32",
        "stride_scales_block": number(config.stored.scales_per_block(config.block_size)),
        "block_table_ptr": "*i32",
        "stride_table_col": DENSE,
        "block_size": number(config.block_size),
        "num_heads": number(config.num_heads),
        "out": lines,
        "lse_ptr": "*fp32",
        "partials": Partials(pointer(partial_dtype(config, variant)), "*fp32"),
        "softmax_scale": "fp32",
    }
    tiles = tiles_of(config, variant)
    constants = {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "SCALES": config.scales,
        "SHARES": _shares(config),
        "NATIVE": arch in WITH_E4M3,
        "MASK": tiles.MASK,
        "TREE_WORDS": tiles.TREE_WORDS,
        "TILE_IN_BLOCK": config.block_size % variant.tile_n == 0,
        "TILE_M": tiles.TILE_M,
        "TILE_N": tiles.TILE_N,
        "FIXED_SPLITS": tiles.FIXED_SPLITS,
    }
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return KernelSpec(attend_kernel, constants, types, options)


def _shares(config: MlaConfig) -> int:
    """Return the number of parts of latents; whole FP8 tiles would not fit into registers."""
    if not config.is_fp8:
        return 1
    if config.scales == "inline":
        return config.stored.inline_scales
    return max(1, config.kv_lora_rank // _SHARE)
