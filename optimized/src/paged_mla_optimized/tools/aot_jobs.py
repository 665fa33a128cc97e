"""Which kernel variants exist for an architecture, as the compiler wants them described.

Options that shape the code differently (mask, block size, dims, dtype) vary one at a time around a
causal decode, for each tile shape the table holds. Ropes are taken in every dtype. FP8 formats have
two of the tile shapes, and fewer options.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paged_mla_optimized.config import DTYPE_NAMES, MASKS, MlaConfig
from paged_mla_optimized.kernels.common.combine import combine_kernel
from paged_mla_optimized.kernels.common.drafts import copy_tails_kernel, draft_rows_kernel
from paged_mla_optimized.kernels.common.gather import gather_kernel
from paged_mla_optimized.kernels.common.merge import merge_kernel
from paged_mla_optimized.kernels.common.merge_lines import merge_lines_kernel
from paged_mla_optimized.kernels.common.merge_tiles import merge_tiles_kernel
from paged_mla_optimized.kernels.common.parts import part_kernel
from paged_mla_optimized.kernels.common.plan import schedule_kernel, token_kernel
from paged_mla_optimized.kernels.common.prefill_plan import prefill_plan_kernel
from paged_mla_optimized.kernels.common.quantise import quantise_kernel
from paged_mla_optimized.kernels.common.rope import rotate_kernel
from paged_mla_optimized.kernels.common.shard import shard_kernel
from paged_mla_optimized.kernels.hopper.prefill import hopper_prefill_kernel
from paged_mla_optimized.kernels.portable.attend import attend_kernel
from paged_mla_optimized.kernels.portable.prefill import prefill_kernel
from paged_mla_optimized.launchers.append import append_choices, append_kernel_of
from paged_mla_optimized.launchers.attend import partial_dtype
from paged_mla_optimized.launchers.combine import MAX_REGISTERS as COMBINE_REGISTERS
from paged_mla_optimized.launchers.combine import NUM_WARPS as COMBINE_WARPS
from paged_mla_optimized.launchers.combine import combine_constants
from paged_mla_optimized.launchers.gather import gather_constants
from paged_mla_optimized.launchers.hopper import (
    hopper_box,
    hopper_boxes,
    hopper_constants,
    hopper_dtype,
    hopper_kernel,
    hopper_layout,
    hopper_options,
)
from paged_mla_optimized.launchers.hopper_prefill import (
    BOXES,
    hopper_prefill_constants,
)
from paged_mla_optimized.launchers.hopper_prefill import (
    NUM_WARPS as PREFILL_WARPS,
)
from paged_mla_optimized.launchers.merge import merge_constants
from paged_mla_optimized.launchers.merge_lines import merge_lines_constants
from paged_mla_optimized.launchers.merge_tiles import merge_tiles_constants
from paged_mla_optimized.launchers.parts import part_constants
from paged_mla_optimized.launchers.portable import attend_constants
from paged_mla_optimized.launchers.prefill import (
    PLAN_WARPS,
    Heads,
    plan_constants,
    portable_constants,
)
from paged_mla_optimized.launchers.quantise import quantise_constants
from paged_mla_optimized.launchers.rotate import rotate_constants
from paged_mla_optimized.launchers.shard import shard_constants
from paged_mla_optimized.planning.choice import demand_of, most_query_len
from paged_mla_optimized.planning.families import (
    PORTABLE,
    TILE_FP8,
    AttendVariant,
    portable_variant,
    variants_by_query_len,
)
from paged_mla_optimized.planning.plan import schedule_constants, token_constants
from paged_mla_optimized.planning.prefill import is_for_hopper, prefill_variant
from paged_mla_optimized.prefill import PrefillConfig
from paged_mla_optimized.stepping.drafts import copy_tails_constants, draft_rows_constants
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Rope, RopePairing

_TYPES = {
    "cu_seqlens_q_ptr": "*i32",
    "cu_seqlens_k_ptr": "*i32",
    "tiles_ptr": "*i32",
    "work_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "token_starts_ptr": "*i32",
    "row_lens_ptr": "*i32",
    "local_lens_ptr": "*i32",
    "key_starts_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "firsts_ptr": "*i32",
    "req_to_token_ptr": "*i32",
    "request_ids_ptr": "*i64",
    "table_ptr": "*i32",
    "branch_blocks_ptr": "*i32",
    "prefix_table_ptr": "*i32",
    "prefix_lens_ptr": "*i32",
    "unit_starts_ptr": "*i64",
    "cut_ptr": "*i64",
    "shares_ptr": "*i64",
    "joins_ptr": "*i32",
    "join_starts_ptr": "*i32",
    "mask_starts_ptr": "*i64",
    "mask_ptr": "*u8",
    "block_table_ptr": "*i32",
    "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64",
    "is_padding_ptr": "*i8",
    "tree_words_ptr": "*i32",
    "lse_ptr": "*fp32",
    "lses_ptr": "*fp32",
    "line_lses_ptr": "*fp32",
    "chunk_lse_ptr": "*fp32",
    "partial_out_ptr": "*fp32",  # of portable kernels
    "partial_lse_ptr": "*fp32",
    "codes_ptr": "*u8",
    "q_scale_ptr": "*fp32",
    "given_scale_ptr": "*fp32",
    "cache_scale_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "softmax_scale": "fp32",
    "lse_unit": "fp32",
    "mask_elements": "i64",
}
_DENSE = {  # strides that are 1 in every engine's tensors; Triton compiles them in
    "stride_cu": 1,
    "stride_cu_q": 1,
    "stride_cu_k": 1,
    "stride_lens": 1,
    "stride_slots": 1,
    "stride_slot": 1,
    "stride_ids": 1,
    "stride_table_col": 1,
    "stride_mask_element": 1,
}
_NUM_SMS = 132  # shapes no code but a division
_SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
}


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a Triton function, its constants, and the type of every argument."""

    name: str
    kernel: Any
    dtype: str  # of every pointer that `_TYPES` leaves open
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    types: dict[str, str] = field(default_factory=dict)  # of arguments, TMA descriptors among them

    @property
    def source(self) -> Any:
        """The kernel as Triton's compiler wants it."""
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, self.signature, self.constants, self.attributes)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options

    @property
    def signature(self) -> dict[str, str]:
        """Type of each argument, in order."""
        table = "*fp64" if self.dtype == "fp32" else "*fp32"
        types = _TYPES | {"cos_ptr": table, "sin_ptr": table} | self.types
        return {
            name: "constexpr"
            if name in self.constants
            else types.get(name, f"*{self.dtype}" if name.endswith("_ptr") else "i32")
            for name in self.kernel.arg_names
        }

    @property
    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Tensors and their strides are aligned to 16."""
        return {
            (parameter.num,): [["tt.divisibility", 16]]
            for parameter in self.kernel.params
            if parameter.name.startswith("stride") or parameter.name.endswith("_ptr")
            if parameter.name not in self.constants and not parameter.do_not_specialize
            if not parameter.do_not_specialize_on_alignment
        }


def jobs_of_arch(arch: str) -> list[Job]:
    """Return every distinct variant of every kernel, each by a name of its own.

    A name that another variant has goes on with the constants that are not that one's.
    """
    jobs: dict[str, Job] = {}
    for job in _jobs(arch):
        first = jobs.setdefault(job.name, job)
        others = {n: value for n, value in job.constants.items() if first.constants[n] != value}
        if others:
            name = "-".join([job.name, *(f"{n.lower()}{value}" for n, value in others.items())])
            jobs.setdefault(name, replace(job, name=name))
    return list(jobs.values())


def _jobs(arch: str) -> Iterator[Job]:
    """Yield variants of every kernel, some of them several times."""
    for config in _configs():
        demand = demand_of(config, arch)
        portable = portable_variant(demand, most_query_len(config))
        # Fixed splits have the same tiles, and with every other option code of their own.
        fixed = replace(config, deterministic=True)
        for each in (config, fixed):
            yield from _jobs_of_config(each, portable, arch)
        for variant in variants_by_query_len(demand, most_query_len(config)):
            yield from _jobs_of_config(config, variant, arch)
            if variant.family != PORTABLE:
                yield from _hopper_jobs(config, variant)
        if config.rope is not None:
            yield _rotate_job(config, arch)
            yield from _quantise_jobs(config, arch)
    yield from _fp8_jobs(arch)
    yield from prefill_jobs(arch)


def _fp8_jobs(arch: str) -> Iterator[Job]:
    """Yield what serves flat FP8 caches alone: Hopper's kernels, and what they need."""
    for config in (*_fast_configs(), *_fp8_configs()):
        for variant in variants_by_query_len(demand_of(config, arch), most_query_len(config)):
            if variant.family != PORTABLE:
                yield from _hopper_jobs(config, variant)
            if variant.family == TILE_FP8:
                yield from _quantise_jobs(config, arch)
                yield _combine_job(config, variant)


def _configs() -> Iterator[MlaConfig]:
    base = MlaConfig(
        num_heads=16,
        softmax_scale=1.0,
        block_size=64,
        max_rows=256,
        max_query_tokens=1,
        max_model_len=1,
    )
    for num_heads in (16, 32, 64, 128):
        config = replace(base, num_heads=num_heads)
        yield config
        yield replace(config, dtype=torch.float16, cache_format="fp16")
        yield replace(config, dtype=torch.float32, cache_format="fp32")
        yield replace(config, block_size=1)
        yield replace(config, block_size=16)
        yield replace(config, mask="non_causal")
        yield replace(config, deterministic=True)
        yield replace(config, deterministic=True, block_size=1)
        for pairing in RopePairing:
            rotated = replace(config, rope=Rope(pairing))
            yield rotated
            yield replace(rotated, dtype=torch.float16, cache_format="fp16")
            yield replace(rotated, dtype=torch.float32, cache_format="fp32")
        # One token per row keeps the tile shape that this head count has in decode.
        for mask in MASKS[2:]:
            yield replace(config, mask=mask, max_draft_tokens=1)
    for mask in MASKS:  # a search of other lengths
        drafts = int(mask.startswith("tree"))
        yield replace(base, mask=mask, max_draft_tokens=drafts, max_rows=1)
        yield replace(base, mask=mask, max_draft_tokens=drafts, max_rows=4)
    yield replace(base, max_query_tokens=256)  # chunks
    for num_heads in (16, 32):  # Mistral Small 4, whole and shared by two ranks
        half = replace(base, num_heads=num_heads, kv_lora_rank=256)
        yield half
        yield replace(half, dtype=torch.float16, cache_format="fp16")
        yield replace(half, block_size=1)
        yield replace(half, deterministic=True)
        yield replace(half, mask="tree:qlen", max_draft_tokens=1)
    yield replace(base, kv_lora_rank=256, qk_rope_head_dim=32)
    yield replace(base, kv_lora_rank=32, qk_rope_head_dim=16)
    for name in (name for name, stored in FORMATS.items() if not stored.is_plain):
        for num_heads in (16, 32):
            config = replace(base, num_heads=num_heads, cache_format=name)
            yield config
            yield replace(config, dtype=torch.float16)
            yield replace(config, dtype=torch.float32)
            yield replace(config, block_size=4)
            yield replace(config, deterministic=True)
            yield replace(config, mask="tree:qlen", max_draft_tokens=1)
        for pairing in RopePairing:
            yield replace(config, rope=Rope(pairing))
        yield replace(base, kv_lora_rank=32, qk_rope_head_dim=16, cache_format=name)


def _over_flat_codes(config: MlaConfig) -> Iterator[MlaConfig]:
    """Yield a config of the flat FP8 format, and it with what takes another variant."""
    yield config
    yield replace(config, dtype=torch.float16)
    yield replace(config, block_size=1)
    yield replace(config, block_size=16)
    yield replace(config, mask="non_causal")
    yield replace(config, mask=MASKS[-1], max_draft_tokens=1)
    yield replace(config, deterministic=True)
    yield replace(config, deterministic=True, block_size=1)


def _over_scaled_codes(config: MlaConfig, *formats: str) -> Iterator[MlaConfig]:
    """Yield a config of formats that have scales of keys, and what takes another variant."""
    for name in formats:
        scaled = replace(config, cache_format=name)
        yield scaled
        yield replace(scaled, block_size=4)
        yield replace(scaled, block_size=16)
        yield replace(scaled, mask=MASKS[-1], max_draft_tokens=1)
        yield replace(scaled, deterministic=True)


def _fast_configs() -> Iterator[MlaConfig]:
    """Yield configs that a kernel of FP8 products may serve."""
    config = MlaConfig(
        num_heads=128,
        softmax_scale=1.0,
        block_size=64,
        max_rows=256,
        max_query_tokens=1,
        max_model_len=1,
        cache_format="fp8_e4m3",
        products="fast",
    )
    yield from _over_flat_codes(config)
    yield from _over_scaled_codes(config, "fp8_block_token", "fp8_block_group")


def _fp8_configs() -> Iterator[MlaConfig]:
    """Yield configs that a kernel of 16-bit products over FP8 caches may serve."""
    for num_heads in (16, 32, 64):
        config = MlaConfig(
            num_heads=num_heads,
            softmax_scale=1.0,
            block_size=64,
            max_rows=256,
            max_query_tokens=1,
            max_model_len=1,
            cache_format="fp8_e4m3",
        )
        yield from _over_flat_codes(config)
        for name in ("fp8_block_token", "fp8_block_group", "fp8_ds_mla"):
            yield replace(config, cache_format=name)
    yield from _over_scaled_codes(config, "fp8_block_token", "fp8_block_group", "fp8_ds_mla")
    yield replace(config, cache_format="fp8_ds_mla", dtype=torch.float16)
    for pairing in RopePairing:
        yield replace(config, rope=Rope(pairing))


def _jobs_of_config(config: MlaConfig, variant: AttendVariant, arch: str) -> Iterator[Job]:
    dtype = _SHORT[config.dtype]
    types = f"{dtype}-{config.cache_format}" if config.is_fp8 else dtype
    cache = {"cache_ptr": "*u8"} if config.is_fp8 else {}
    tile = f"m{variant.tile_m}n{variant.tile_n}"
    dims = f"r{config.kv_lora_rank}"
    mask = "tree" if config.is_tree else config.mask
    blocks = "blocks" if config.block_size % variant.tile_n == 0 else "gather"
    rope = config.rope_pairing
    yield Job(
        f"attend-{tile}-{dims}-{types}-{mask}-{blocks}-{_cut(config)}",
        attend_kernel,
        dtype,
        _dense(attend_kernel, attend_constants(config, variant, arch)),
        variant.num_warps,
        variant.num_stages,
        types=cache,
    )
    yield _combine_job(config, variant)
    for few, run_tokens in append_choices(config):
        append, constants, warps = append_kernel_of(config, arch, few=few, run_tokens=run_tokens)
        name = f"append-{dims}-{types}-{rope}" + f"-runs{run_tokens}" * (run_tokens > 0)
        yield Job(name, append, dtype, _dense(append, constants), warps, types=cache)
    yield from _plan_jobs(config, variant)
    for name, kernel, constants in (
        (f"gather-{dims}-{types}", gather_kernel, gather_constants(config, arch)),
        ("draft-rows", draft_rows_kernel, draft_rows_constants()),
        (f"copy-tails-{dims}-{types}", copy_tails_kernel, _copy_tails_constants(config)),
        (f"merge-{dims}", merge_kernel, merge_constants(config.kv_lora_rank)),
        (f"merge-lines-{dims}-{dtype}", merge_lines_kernel, merge_lines_constants(config)),
        ("shard", shard_kernel, shard_constants(config, 2, 1)),
    ):
        pointers = "fp32" if kernel is merge_kernel else dtype
        yield Job(name, kernel, pointers, _dense(kernel, constants), types=cache)


def _cut(config: MlaConfig) -> str:
    return "fixed" if config.deterministic else "parts"


def _combine_job(config: MlaConfig, variant: AttendVariant) -> Job:
    dtype, partial = _SHORT[config.dtype], _SHORT[partial_dtype(config, variant)]
    overlap = "alone" if variant.family == PORTABLE else "overlapped"
    rounded = f"-of-{partial}" if partial != "fp32" else ""
    return Job(
        f"combine-{overlap}-r{config.kv_lora_rank}-{dtype}-{_cut(config)}{rounded}",
        combine_kernel,
        dtype,
        combine_constants(config, variant),
        COMBINE_WARPS,
        max_registers=COMBINE_REGISTERS,
        types={"partial_out_ptr": f"*{partial}"},
    )


def _plan_jobs(config: MlaConfig, variant: AttendVariant) -> Iterator[Job]:
    """Yield the kernels of a plan, over dense inputs and over inputs of any strides."""
    tile = f"m{variant.tile_m}n{variant.tile_n}"
    of_step = f"{config.mask}-{_cut(config)}-rows{config.max_rows}"
    for name, kernel, constants in (
        (
            f"schedule-{tile}x{variant.lanes}-{of_step}",
            schedule_kernel,
            schedule_constants(config, variant, _NUM_SMS),
        ),
        (f"token-{tile}-{of_step}", token_kernel, token_constants(config, variant)),
    ):
        dtype = _SHORT[config.dtype]
        yield Job(name, kernel, dtype, _dense(kernel, constants))
        yield Job(f"{name}-strided", kernel, dtype, constants)


def _copy_tails_constants(config: MlaConfig) -> dict[str, Any]:
    scales = config.stored.scales_per_block(config.block_size)
    return copy_tails_constants(config.stored.row(config)[1], scales)


def _rotate_job(config: MlaConfig, arch: str) -> Job:
    constants = rotate_constants(config, arch)
    overlap = "overlapped" if constants["OVERLAP"] else "alone"
    return Job(
        f"rotate-{overlap}-p{config.qk_rope_head_dim}-{_SHORT[config.dtype]}-{config.rope_pairing}",
        rotate_kernel,
        _SHORT[config.dtype],
        constants,
    )


def _quantise_jobs(config: MlaConfig, arch: str) -> Iterator[Job]:
    dtype, rope = _SHORT[config.dtype], config.rope_pairing
    for scale in ("data", "given"):
        constants = quantise_constants(config, arch, is_given=scale == "given")
        overlap = "overlapped" if constants["OVERLAP"] else "alone"
        name = f"quantise-{overlap}-r{config.kv_lora_rank}-{dtype}-{rope}-{scale}"
        yield Job(name, quantise_kernel, dtype, constants)


def _hopper_jobs(config: MlaConfig, variant: AttendVariant) -> Iterator[Job]:
    dtype = _SHORT[config.dtype]
    kernel = hopper_kernel(variant)
    word = _SHORT[hopper_dtype(config)]
    boxes = zip(("ckv_desc", "k_pe_desc"), hopper_boxes(config, variant), strict=True)
    types = {name: f"tensordesc<{word}{box},{hopper_layout(box)!r}>" for name, box in boxes}
    types["partial_out_ptr"] = f"*{_SHORT[partial_dtype(config, variant)]}"
    mask = "tree" if config.is_tree else config.mask
    options = hopper_options(variant)
    if config.is_fp8:
        types |= {"q_ptr": "*u8", "cache_ptr": "*u8"}
    stride_row = config.stored.token_bytes(config) // 2
    stride_scales = config.stored.scales_per_block(config.block_size)
    stored = f"{dtype}-{config.cache_format}" if config.is_fp8 else dtype
    geometry = config.block_size, stride_row, stride_scales
    constants = hopper_constants(config, variant, *geometry)
    rope = f"-{constants['ROPE']}" if constants.get("ROPE", "none") != "none" else ""
    yield Job(
        f"hopper-{variant.family}-m{variant.tile_m}-r{config.kv_lora_rank}-{stored}-{mask}"
        f"-box{hopper_box(config.block_size)}-{_cut(config)}{rope}",
        kernel,
        dtype,
        _dense(kernel, constants),
        options["num_warps"],
        max_registers=options.get("maxnreg"),
        types=types,
    )


def prefill_jobs(arch: str) -> Iterator[Job]:
    """Return every variant of prefill: DeepSeek's heads and GLM's."""
    base = PrefillConfig(num_heads=16, softmax_scale=1.0, max_rows=256, max_tokens=1)
    glm = replace(base, qk_nope_head_dim=192, v_head_dim=256)
    for heads, dtype, causal in itertools.product((base, glm), DTYPE_NAMES, (True, False)):
        config = replace(heads, dtype=dtype, causal=causal)
        demand = (arch, DTYPE_NAMES[dtype], config.head_dims)
        variant = prefill_variant(*demand)
        mask = "causal" if causal else "non_causal"
        name = f"{'x'.join(map(str, config.head_dims))}-{_SHORT[dtype]}-{mask}"
        yield _prefill_plan_job(config, variant.tile_m, arch, mask)
        if not causal:
            yield from _chunk_jobs(config, variant.tile_m, arch)
        yield Job(
            f"prefill-m{variant.tile_m}n{variant.tile_n}-{name}",
            prefill_kernel,
            _SHORT[dtype],
            portable_constants(config, variant),
            variant.num_warps,
            variant.num_stages,
        )
        if is_for_hopper(*demand):
            boxes = zip(Heads._fields, BOXES, strict=True)
            yield Job(
                f"hopper-prefill-{name}",
                hopper_prefill_kernel,
                _SHORT[dtype],
                hopper_prefill_constants(config),
                PREFILL_WARPS,
                types={
                    f"{field}_desc": f"tensordesc<{_SHORT[dtype]}{box},{hopper_layout(box)!r}>"
                    for field, box in boxes
                },
            )


def _prefill_plan_job(config: PrefillConfig, tile_m: int, arch: str, keys: str) -> Job:
    return Job(
        f"prefill-plan-m{tile_m}-{keys}",
        prefill_plan_kernel,
        "i32",
        _dense(prefill_plan_kernel, plan_constants(config, tile_m, arch)),
        PLAN_WARPS,
    )


def _chunk_jobs(config: PrefillConfig, tile_m: int, arch: str) -> Iterator[Job]:
    """Yield what chunks of context need beyond a prefill that is not causal."""
    yield _prefill_plan_job(replace(config, writes_empty=False), tile_m, arch, "chunk")
    yield Job("part", part_kernel, "i32", _dense(part_kernel, part_constants(config.max_rows)))
    dtype, width = _SHORT[config.dtype], config.v_head_dim
    yield Job(
        f"merge-tiles-m{tile_m}-v{width}-{dtype}",
        merge_tiles_kernel,
        dtype,
        merge_tiles_constants(tile_m, width),
    )


def _dense(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    special = {p.name for p in kernel.params if not p.do_not_specialize}
    return constants | {name: one for name, one in _DENSE.items() if name in special}
