"""Launch the Gluon kernels for Hopper, if they support the problem and its tensors.

They copy keys by TMA, or thread by thread if a block does not fit a TMA box. In both cases the
cache must be rows of one stride: blocks must be a whole number of rows apart, and each row must
begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_mla_optimized.config.architectures import SHARED_MEMORY
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.cache_layout import CacheLayout
from paged_mla_optimized.kernels.common.token_head import Lines, Partials
from paged_mla_optimized.kernels.hopper.decode_few import decode_few_kernel
from paged_mla_optimized.kernels.hopper.decode_few_fp8 import decode_few_fp8_kernel
from paged_mla_optimized.kernels.hopper.decode_tile import decode_tile_kernel
from paged_mla_optimized.kernels.hopper.decode_tile_exact import decode_tile_exact_kernel
from paged_mla_optimized.kernels.hopper.decode_tile_fp8 import decode_tile_fp8_kernel
from paged_mla_optimized.kernels.hopper.keys import Geometry, ScaleFormat
from paged_mla_optimized.kernels.hopper.rope import RopeTables
from paged_mla_optimized.operations.argument_types import (
    cache_pointer,
    partial_dtype,
    rope_pointer,
)
from paged_mla_optimized.operations.queries.quantize import QuantizeQueries
from paged_mla_optimized.operations.queries.rotate import RotateQueries
from paged_mla_optimized.planning.families import (
    FEW,
    FEW_FP8,
    TILE,
    TILE_EXACT,
    TILE_FP8,
    AttendVariant,
)
from paged_mla_optimized.planning.plan import WORK_TYPES, Plan, tiles_of
from paged_mla_optimized.runtime.bounded import Bounded
from paged_mla_optimized.runtime.kernel_spec import (
    DENSE,
    SHORT,
    STRIDE,
    KernelSpec,
    overlap_options,
    pointer,
)
from paged_mla_optimized.runtime.launch import Descriptors, Fixed, Launcher
from paged_mla_optimized.tensors.latent_cache import LatentCache, scales_and_stride
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.triton_compat.kernels import parameter_names

_BOX = 64  # largest number of keys of one copy
_BARRIERS = 1024  # bytes of shared memory for barriers and alignment
# Average registers per thread: warps that compute get more, warps that copy fewer.
_FEW_REGISTERS = 152
_FEW_FP8_REGISTERS = 168
MAX_CACHES = 4096
"""The number of caches (one per layer) whose tensor maps are stored before all are dropped."""
MAX_KERNELS = 64
"""The number of cache strides whose kernels are stored; after that, all are dropped."""
_KERNELS = {
    FEW: decode_few_kernel,
    TILE: decode_tile_kernel,
    FEW_FP8: decode_few_fp8_kernel,
    TILE_FP8: decode_tile_fp8_kernel,
    TILE_EXACT: decode_tile_exact_kernel,
}
_NO_ROPE = RopeTables(None, None, None)


def cache_fits(cache: torch.Tensor) -> bool:
    """Return whether TMA can address `cache` [num_blocks, block_size, R + P] as rows."""
    stride_block, stride_token, _ = cache.stride()
    return (
        cache.data_ptr() % 16 == 0
        and stride_token >= cache.shape[2]
        and stride_token * cache.element_size() % 16 == 0
        and stride_block >= stride_token
        and stride_block % stride_token == 0
        and 0 < cache.shape[0] * (stride_block // stride_token) < 2**31  # TMA rejects 0 rows
    )


def queries_fit(*queries: torch.Tensor) -> bool:
    """Return whether queries can be copied to shared memory in pieces of 16 bytes.

    Addresses in bytes and strides in elements must be multiples of 16; the compiler relies on this.
    """
    bits = 0
    for q in queries:
        of_token, of_head, _ = q.stride()
        bits |= of_token | of_head | q.data_ptr()
    return bits % 16 == 0


@dataclass(frozen=True)
class Origin:
    """The start of a tensor: all properties that Triton reads from a descriptor's tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Rows(NamedTuple):
    """A cache as rows: the kernel for its strides, and its descriptors."""

    kernel: Launcher
    descriptors: Descriptors


class HopperAttention:
    """Launcher of one Gluon kernel; it stores the tensor maps of caches, but not the caches.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
        A variant of a family in kernels/hopper.
    programs : int
        Size of the grid.
    quantize : QuantizeQueries or None
        The quantization; required for a family of FP8 products.
    rotate : RotateQueries or None
        The rotation; required if the config has a rope.
    """

    def __init__(
        self,
        config: MlaConfig,
        variant: AttendVariant,
        programs: int,
        quantize: QuantizeQueries | None = None,
        rotate: RotateQueries | None = None,
    ) -> None:
        self.config = config
        self.variant = variant
        self.programs = programs
        self._quantize = quantize if variant.family == TILE_FP8 else None
        self._rotate = None if self._quantize is not None else rotate
        self._kernels: Bounded[tuple[int, int, int], Launcher] = Bounded(MAX_KERNELS)
        self._caches: Bounded[Hashable, Rows] = Bounded(MAX_CACHES)

    def takes(self, queries: Queries) -> bool:
        """Return whether the kernel can read these queries, or quantizes them first."""
        if self._quantize is not None:
            return True
        # The kernel loads the part that it rotates, which needs no alignment, and copies the rest.
        return queries_fit(queries.nope) if self._rotate is not None else queries_fit(*queries)

    def rows_of(self, latents: torch.Tensor, stride_scales: int = 0) -> Rows | None:
        """Return a cache's latents as rows, or None if TMA cannot address them.

        `stride_scales` is the stride of a block in the scale tensor, if there is one.
        """
        key = (latents.data_ptr(), latents.shape, latents.stride(), stride_scales)
        rows = self._caches.get(key)
        if rows is None and cache_fits(latents):
            rows = self._caches[key] = self._as_rows(latents, stride_scales)
        return rows

    def launch(
        self,
        rows: Rows,
        plan: Plan,
        queries: Queries,
        cache: LatentCache,
        answer: Answer,
        *,
        partials: Fixed,
    ) -> None:
        """Write `answer` for groups that are not split, and `partials` for all others.

        `rows` is the result of :meth:`rows_of` for the latents of `cache`.
        """
        (q_nope, q_pe), (out, lse) = queries, answer
        table = plan.block_table
        of_table, of_out = table.stride(), out.stride()
        if self._quantize is not None:
            arguments: tuple[Any, ...] = self._quantize.launch(q_nope, q_pe, plan.positions)
            of_queries: tuple[int, ...] = ()
        else:
            of_nope, of_pe = q_nope.stride(), q_pe.stride()
            of_queries = (*of_nope[:2], *of_pe[:2])
            rotate = self._rotate
            tables = _NO_ROPE if rotate is None else (plan.positions, *rotate.tables)
            arguments = ((q_nope, *of_nope[:2]), (q_pe, *of_pe[:2]), tables)
        rows.kernel(
            (self.programs, 1, 1),
            (of_queries, of_table[1], of_out),
            plan.work,
            *arguments,
            cache.latents,
            *(scales_and_stride(cache)[:1] if self.config.is_fp8 else ()),
            table,
            *of_table,
            cache.latents.shape[0],
            (out, *of_out[:2]),
            lse,
            *lse.stride(),
            partials,
            self.config.softmax_scale,
            rows.descriptors,
        )

    def _as_rows(self, cache: torch.Tensor, stride_scales: int) -> Rows:
        num_blocks, block_size, width = cache.shape
        stride_block, stride_token, _ = cache.stride()
        block_rows = stride_block // stride_token
        # Kernels read the cache as words of 16 bits, for every format.
        stride_row, width = (n * cache.element_size() // 2 for n in (stride_token, width))
        geometry = (block_rows, stride_row, stride_scales)
        kernel = self._kernels.get(geometry)
        if kernel is None:
            kernel = self._kernels[geometry] = Launcher(
                hopper_spec(self.config, self.variant, *geometry),
                cluster=_cluster(self.variant, self.programs),
            )
        origin = Origin(cache.data_ptr(), _word(self.config))
        shape = [(num_blocks - 1) * block_rows + block_size, width]
        descriptors = (
            TensorDescriptor(origin, shape, [stride_row, 1], box, hopper_layout(box))
            for box in hopper_boxes(self.config, self.variant)
        )
        return Rows(kernel, Descriptors(*descriptors))


def has_rope(variant: AttendVariant) -> bool:
    """Return whether the kernel of a family rotates queries by itself."""
    return "ROPE" in parameter_names(_KERNELS[variant.family])


def _cluster(variant: AttendVariant, programs: int) -> int:
    """Return the cluster size: 2 if lanes, which read the same keys, can run in pairs."""
    return 2 if variant.lanes > 1 and programs % 2 == 0 else 1


def hopper_box(block_size: int) -> int:
    """Return the keys of one copy: a block, or a part of a larger block; 0 if no box fits."""
    if block_size % _BOX == 0:
        return _BOX
    return block_size if block_size in {8, 16, 32} else 0  # the swizzle repeats every 8 rows


def hopper_boxes(config: MlaConfig, variant: AttendVariant) -> tuple[list[int], list[int]]:
    """Return the boxes of one copy: of the latent columns, whole or halved, and of the rotated key.

    Each box is [keys, words of 16 bits].
    """
    keys = hopper_box(config.block_size) or _BOX
    layout = CacheLayout.of(config)
    whole = variant.family in {FEW, FEW_FP8, TILE_EXACT}
    columns = layout.ckv_words if whole else layout.ckv_words // 2
    return [keys, columns], [keys, layout.k_pe_words]


def hopper_layout(box: list[int]) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a box of 16-bit words."""
    return gl.NVMMASharedLayout(min(box[1] * 2, 128), element_bitwidth=16, rank=2)


def _word(config: MlaConfig) -> torch.dtype:
    """Return the dtype that kernels use for the 16-bit words of a cache."""
    return torch.int16 if config.is_fp8 else config.dtype


def _stages(config: MlaConfig, variant: AttendVariant) -> int:
    """Return the number of key tiles that fit in the ring of the kernels for few queries."""
    queries = (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    if config.scales == "inline" and config.dtype == torch.float16:
        queries += config.qk_rope_head_dim * 2  # the rotated part has two pieces
    weights = variant.tile_n * 2
    ratios = variant.tile_n * config.stored.inline_scales * 2
    layout = CacheLayout.of(config)
    key = layout.row_bytes + layout.scale_bytes
    room = SHARED_MEMORY["sm90"] - _BARRIERS - variant.tile_m * (queries + weights) - ratios
    return room // (variant.tile_n * key)


def hopper_spec(
    config: MlaConfig,
    variant: AttendVariant,
    block_rows: int,
    stride_row: int,
    stride_scales: int = 0,
) -> KernelSpec:
    """Return the kernel of a family.

    `block_rows` is the stride of a block in rows of the cache. `stride_row` is the stride of a row
    in words of 16 bits. `stride_scales` is the stride of a block in the scale tensor.
    """
    kernel = _KERNELS[variant.family]
    constants = {
        "tiles": tiles_of(config, variant),
        "geometry": Geometry(
            config.block_size, block_rows, stride_row, hopper_box(config.block_size)
        ),
        "scale_format": ScaleFormat(
            stride_scales, config.scales, CacheLayout.of(config).scale_groups
        ),
        "ROPE": config.rope_pairing,
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "STAGES": _stages(config, variant),
    }
    taken = {name: constants[name] for name in parameter_names(kernel) if name in constants}
    return KernelSpec(kernel, taken, _types(config, variant), _options(variant))


def _types(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return the types of a kernel's arguments."""
    query, table = pointer(config.dtype), rope_pointer(config)
    lines = Lines(query, STRIDE, STRIDE)
    has_tables = config.rope_pairing != "none"
    boxes = zip(("ckv_desc", "k_pe_desc"), hopper_boxes(config, variant), strict=True)
    types = {
        "work": WORK_TYPES,
        "q_nope": lines,
        "q_pe": lines,
        "q_ptr": "*u8",
        "q_scale_ptr": "*fp32",
        "rope_tables": RopeTables("*i64", table, table) if has_tables else _NO_ROPE,
        "cache_ptr": cache_pointer(config),
        "scales_ptr": "*fp32",
        "block_table_ptr": "*i32",
        "stride_table_col": DENSE,
        "out": lines,
        "lse_ptr": "*fp32",
        "partials": Partials(pointer(partial_dtype(config, variant)), "*fp32"),
        "softmax_scale": "fp32",
    } | {
        name: f"tensordesc<{SHORT[_word(config)]}{box},{hopper_layout(box)!r}>"
        for name, box in boxes
    }
    taken = parameter_names(_KERNELS[variant.family])
    return {name: type_ for name, type_ in types.items() if name in taken}


def _options(variant: AttendVariant) -> dict[str, int]:
    """Return the launch options of a family."""
    options = {"num_warps": 4} | overlap_options(overlaps=True)
    if variant.family == FEW:
        options["maxnreg"] = _FEW_REGISTERS
    if variant.family == FEW_FP8:
        options |= {"num_warps": 8, "maxnreg": _FEW_FP8_REGISTERS}
    if variant.family == TILE_EXACT:
        options["num_warps"] = 8
    return options
