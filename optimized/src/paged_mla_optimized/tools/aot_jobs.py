"""Which kernel variants exist for an architecture, as the compiler wants them described.

They are found as dispatch finds them: ``planning/families.py`` says which tiles serve which heads,
and the launchers what a kernel is specialised for. Every combination of these is compiled once:

* tile, dtype, cache format, products, mask, a rope, whether splits are of fixed length, and how
  keys are copied: by which TMA box, one by one, or in the portable kernels by whole blocks or not;
* of the plan's kernels, every spelling of a mask, and inputs that are dense or not;
* of an append, each kernel that a step may get.

Numbers that are compiled in have too many values for that: heads, block size, capacities, and the
widths of kernels that take any. Most are factors and divisors, for which ptxas still orders
instructions in ways of their own, so each variant takes one value of each by turns, see
``aot_axes.py``. Beside that, every number of heads up to 128 is compiled in each tile of Hopper's
kernels that serves it, and in those for few queries with every mask and cut, and with no box too.

Tensors and their strides are aligned to 16, and the blocks of a cache follow each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES, MASKS, TORCH_DTYPES, MlaConfig
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.append.launch import append_choices, append_spec
from paged_mla_optimized.operations.argument_types import partial_dtype
from paged_mla_optimized.operations.attend.combine import combine_spec
from paged_mla_optimized.operations.attend.hopper import has_rope, hopper_spec
from paged_mla_optimized.operations.attend.portable import attend_spec
from paged_mla_optimized.operations.gather.launch import gather_spec
from paged_mla_optimized.operations.merge.lines import merge_lines_spec
from paged_mla_optimized.operations.merge.partials import merge_spec
from paged_mla_optimized.operations.merge.tiles import merge_tiles_spec
from paged_mla_optimized.operations.prefill.hopper import hopper_prefill_spec
from paged_mla_optimized.operations.prefill.key_chunks import part_spec
from paged_mla_optimized.operations.prefill.portable import plan_spec, portable_spec
from paged_mla_optimized.operations.queries.quantize import quantise_spec
from paged_mla_optimized.operations.queries.rotate import rotate_spec
from paged_mla_optimized.operations.shard.launch import shard_spec
from paged_mla_optimized.planning.families import FAMILIES, FEW, PORTABLE, AttendVariant
from paged_mla_optimized.planning.plan import schedule_spec, token_spec
from paged_mla_optimized.planning.prefill import is_for_hopper, prefill_variant
from paged_mla_optimized.runtime.kernel_spec import SHORT, STRIDE
from paged_mla_optimized.serving.drafts import copy_tails_spec, draft_rows_spec
from paged_mla_optimized.tools.aot_axes import (
    BLOCKS,
    DIMS,
    HEADS,
    ROWS,
    SERVED,
    Types,
    blocks_by_box,
    blocks_by_tile,
    config_of,
    drawn,
    is_for_gluon,
    numbers_of,
    served,
    types,
)
from paged_mla_optimized.tools.aot_job import Job
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Rope, RopePairing

_NUM_SMS = 132  # shapes no code but a division
_MASKS = (*MASKS[:2], MASKS[-1])  # one tree: kernels other than a plan's do not see its spelling
_CUTS = (False, True)  # whether splits are of fixed length
_ROPES = (None, *map(Rope, RopePairing))
_OTHER_DIMS = tuple(dims for dims in DIMS if dims != SERVED)
_LONG_BLOCK = 256  # tokens: a group of them is no run of an append
_ATTEND = {"attend_kernel", *(f"decode_{family}_kernel" for family in FAMILIES)}
_SAMPLED_ATTEND = 2
_PREFILL_DIMS = (  # of a head: keys without and with position, values
    *((128, 64, 128), (192, 64, 256)),  # DeepSeek's and GLM's
    *((16, 16, 16), (48, 32, 64), (256, 64, 256)),  # the least, a sum of powers of two, the most
)


def jobs_of_arch(arch: str) -> list[Job]:
    """Return every distinct variant of every kernel, each by a name of its own.

    A name that another variant has goes on with what is not that one's.
    """
    jobs: dict[str, Job] = {}
    seen = set()
    for job in _jobs(arch):
        if job.identity in seen:
            continue
        seen.add(job.identity)
        first = jobs.setdefault(job.name, job)
        if first is not job:
            name = "-".join((job.name, *_differences(first, job)))
            if name in jobs:
                raise RuntimeError(f"two variants for {arch} have the name {name}")
            jobs[name] = replace(job, name=name)
    return list(jobs.values())


def sample_of(jobs: list[Job]) -> list[Job]:
    """Return one variant of each kernel, and two of each attend kernel, the same in every run.

    Those two are the first variant and one from the middle of the list.
    """
    by_kernel: dict[str, list[Job]] = {}
    for job in jobs:
        by_kernel.setdefault(job.kernel.fn.__name__, []).append(job)
    chosen: dict[str, Job] = {}
    for kernel, all_ in by_kernel.items():
        count = _SAMPLED_ATTEND if kernel in _ATTEND else 1
        chosen |= {job.name: job for job in all_[:: -(-len(all_) // count)]}
    return list(chosen.values())


def _differences(first: Job, job: Job) -> Iterator[str]:
    """Yield what a variant has, and another one of its name has not."""
    one = dict(first.features())
    for name, value in job.features():
        if one.get(name) != value:
            yield f"{name}{value}"


def _jobs(arch: str) -> Iterator[Job]:
    """Yield variants of every kernel, some of them several times."""
    yield from _hopper_jobs(arch)
    yield from _hopper_heads(arch)
    yield from _attend_jobs(arch)
    yield from _plan_jobs(arch)
    yield from _cache_jobs(arch)
    yield from _query_jobs(arch)
    yield from _prefill_jobs(arch)


def _short(types: Types) -> str:
    """Return how names spell dtype and cache format."""
    dtype = SHORT[TORCH_DTYPES[types.dtype]]
    if FORMATS[types.cache_format].is_plain:
        return dtype
    return f"{dtype}-{types.cache_format}"


def _cut(is_fixed: bool) -> str:  # noqa: FBT001
    return "fixed" if is_fixed else "parts"


def _tree(mask: str) -> str:
    return "tree" if mask.startswith("tree") else mask


class _Tile(NamedTuple):
    """A tile of one kernel for Hopper, and what it serves."""

    types: Types
    dims: tuple[int, int]
    variant: AttendVariant  # one of several that differ in how work is shared alone
    heads: list[int]


class _Options(NamedTuple):
    """What else shapes the code of a kernel for Hopper."""

    mask: str
    is_fixed: bool
    rope: Rope | None
    box: int


def _hopper_tiles(arch: str) -> Iterator[_Tile]:
    for of, dims in itertools.product(types(), DIMS):
        if not is_for_gluon(arch, of, dims):
            continue
        tiles: dict[tuple[str, int], _Tile] = {}
        for variant, heads in served(arch, of, dims).items():
            if variant.family != PORTABLE:
                key = variant.family, variant.tile_m
                tile = tiles.setdefault(key, _Tile(of, dims, variant, []))
                tile.heads.extend(heads)
        yield from tiles.values()


def _hopper_jobs(arch: str) -> Iterator[Job]:
    """Yield Hopper's kernels with every combination of options."""
    names = set()  # what serves exact products serves some fast ones too
    for tile in _hopper_tiles(arch):
        ropes = _ROPES if has_rope(tile.variant) else _ROPES[:1]
        boxes = blocks_by_box(tile.types.cache_format)
        for mask, is_fixed, rope, box in itertools.product(_MASKS, _CUTS, ropes, boxes):
            options = _Options(mask, is_fixed, rope, box)
            name = _hopper_name(tile, options)
            if name not in names:
                names.add(name)
                yield _hopper_job(tile, options, drawn(f"heads {name}", tile.heads))


def _hopper_heads(arch: str) -> Iterator[Job]:
    """Yield Hopper's kernels with every number of heads."""
    tiles: dict[tuple[str, int], list[_Tile]] = {}
    for tile in _hopper_tiles(arch):
        tiles.setdefault((tile.variant.family, tile.variant.tile_m), []).append(tile)
    every = [_Options(*each) for each in itertools.product(_MASKS, _CUTS, (None,), (0, 64))]
    for ((family, _), among), num_heads in itertools.product(tiles.items(), HEADS):
        serving = [tile for tile in among if num_heads in tile.heads]
        if not serving:
            continue
        name = f"{family} {num_heads} of {serving}"
        if family == FEW:
            plain = Types("bfloat16", "bf16", "exact")
            [tile] = [tile for tile in serving if (tile.types, tile.dims) == (plain, SERVED)]
            for options in every:
                yield _hopper_job(tile, options, num_heads)
        else:
            yield _hopper_job(drawn(name, serving), drawn(f"options {name}", every), num_heads)


def _hopper_name(tile: _Tile, options: _Options) -> str:
    variant = tile.variant
    rotated = "" if options.rope is None else f"-{options.rope.pairing}"
    return (
        f"hopper-{variant.family}-m{variant.tile_m}-r{tile.dims[0]}-{_short(tile.types)}"
        f"-{_tree(options.mask)}-box{options.box}-{_cut(options.is_fixed)}{rotated}"
    )


def _hopper_job(tile: _Tile, options: _Options, num_heads: int) -> Job:
    variant, name = tile.variant, _hopper_name(tile, options)
    blocks = blocks_by_box(tile.types.cache_format)[options.box]
    config = config_of(
        tile.types,
        tile.dims,
        num_heads=num_heads,
        block_size=drawn(f"blocks {name} {num_heads}", blocks),
        mask=options.mask,
        deterministic=options.is_fixed,
        rope=options.rope,
        **numbers_of(name, options.mask),
    )
    geometry = (
        config.block_size,
        config.stored.token_bytes(config) // 2,
        config.stored.scales_per_block(config.block_size),
    )
    return Job(
        f"{name}-h{num_heads}-b{config.block_size}",
        hopper_spec(config, variant, *geometry),
        SHORT[config.dtype],
    )


def _portable_tiles(
    arch: str,
) -> Iterator[tuple[Types, tuple[tuple[int, int], ...], AttendVariant, list[int]]]:
    """Yield tiles of the portable kernel, which also steps in for Hopper's, and what they serve.

    Types, pairs of R and P, and heads.
    """
    for of in types():
        others = [dims for dims in _OTHER_DIMS if is_for_gluon(arch, of, dims)]
        for dims in (SERVED, *(others or _OTHER_DIMS[:1])):
            for variant, heads in served(arch, of, dims).items():
                is_chosen = variant.family != PORTABLE or dims == SERVED
                yield of, (dims,) if is_chosen else _OTHER_DIMS, variant, heads


def _attend_jobs(arch: str) -> Iterator[Job]:
    """Yield the portable attend kernel, and the join of what it or a kernel for Hopper leaves."""
    for of, dims, variant, heads in _portable_tiles(arch):
        widths = f"r{dims[0][0]}" if len(dims) == 1 else "others"
        tile = f"m{variant.tile_m}n{variant.tile_n}"
        blocks = blocks_by_tile(of.cache_format, variant.tile_n)
        for mask, is_fixed, is_whole in itertools.product(_MASKS, _CUTS, blocks):
            keys = "blocks" if is_whole else "gather"
            name = f"{tile}-{widths}-{_short(of)}-{_tree(mask)}-{keys}-{_cut(is_fixed)}"
            config = config_of(
                of,
                drawn(f"dims {name}", dims),
                num_heads=drawn(f"heads {name}", heads),
                block_size=drawn(f"blocks {name}", blocks[is_whole]),
                mask=mask,
                deterministic=is_fixed,
                **numbers_of(name, mask),
            )
            yield _attend_job(f"attend-{name}", config, variant, arch)
            yield _combine_job(config, variant)


def _attend_job(name: str, config: MlaConfig, variant: AttendVariant, arch: str) -> Job:
    partial = SHORT[partial_dtype(config, variant)]
    rounded = f"-of-{partial}" if partial != "fp32" else ""
    return Job(
        f"{name}{rounded}-h{config.num_heads}-b{config.block_size}",
        attend_spec(config, variant, arch),
        SHORT[config.dtype],
    )


def _combine_job(config: MlaConfig, variant: AttendVariant) -> Job:
    dtype, partial = SHORT[config.dtype], SHORT[partial_dtype(config, variant)]
    overlap = "alone" if variant.family == PORTABLE else "overlapped"
    rounded = f"-of-{partial}" if partial != "fp32" else ""
    return Job(
        f"combine-{overlap}-r{config.kv_lora_rank}-{dtype}-{_cut(config.deterministic)}{rounded}",
        combine_spec(config, variant),
        dtype,
    )


def _plan_jobs(arch: str) -> Iterator[Job]:
    """Yield the kernels of a plan, over dense inputs and over inputs of any strides."""
    tiles: dict[AttendVariant, tuple[Types, tuple[int, int], list[int]]] = {}
    for of, every_dims, variant, heads in _portable_tiles(arch):
        tiles.setdefault(variant, (of, every_dims[0], heads))
    for variant, (of, dims, heads) in tiles.items():
        for mask, is_fixed in itertools.product(MASKS, _CUTS):
            name = f"m{variant.tile_m}n{variant.tile_n}x{variant.lanes}-{mask}-{_cut(is_fixed)}"
            capacities = numbers_of(f"{name}-{variant.overhead}-{variant.split_tiles}", mask)
            config = config_of(
                of,
                dims,
                num_heads=drawn(f"heads {name}", heads),
                block_size=drawn(f"blocks {name}", BLOCKS[3::4]),
                mask=mask,
                deterministic=is_fixed,
                **capacities,
            )
            yield from _plan_jobs_of(config, variant)
            if variant.tile_m == 16:  # few rows make the smallest searches
                for max_rows in ROWS[:3]:
                    yield from _plan_jobs_of(replace(config, max_rows=max_rows), variant)


def _plan_jobs_of(config: MlaConfig, variant: AttendVariant) -> Iterator[Job]:
    tile = f"m{variant.tile_m}n{variant.tile_n}"
    of_step = f"{config.mask}-{_cut(config.deterministic)}-rows{config.max_rows}"
    schedule, token = f"schedule-{tile}x{variant.lanes}-{of_step}", f"token-{tile}-{of_step}"
    strided = {"stride": STRIDE, "ids": "*i64"}  # ids of requests are of either width
    yield Job(schedule, schedule_spec(config, variant, _NUM_SMS), "i32")
    yield Job(f"{schedule}-strided", schedule_spec(config, variant, _NUM_SMS, **strided), "i32")
    yield Job(token, token_spec(config, variant), "i32")
    yield Job(f"{token}-strided", token_spec(config, variant, stride=STRIDE), "i32")


def _cache_jobs(arch: str) -> Iterator[Job]:
    """Yield what writes, reads and copies caches."""
    stored = [of for of in types() if of.products == "exact"]  # products change no cache
    for of, is_served in itertools.product(stored, (True, False)):
        multiple = FORMATS[of.cache_format].block_size_multiple
        blocks = [size for size in BLOCKS if size % multiple == 0 and size < _LONG_BLOCK // 2]
        for rope in _ROPES:
            name = f"{of}-{is_served}-{rope}"
            dims = SERVED if is_served else drawn(f"dims {name}", _OTHER_DIMS)
            for block_size in (drawn(f"blocks {name}", blocks), _LONG_BLOCK):
                config = config_of(of, dims, block_size=block_size, rope=rope)
                yield from _append_jobs(config, arch)
        max_rows = drawn(f"rows {name}", ROWS)
        yield from _read_jobs(replace(config, rope=None, max_rows=max_rows), arch)


def _append_jobs(config: MlaConfig, arch: str) -> Iterator[Job]:
    for few, run_tokens in append_choices(config):
        runs = f"-runs{run_tokens}" if run_tokens > 0 else ""
        yield Job(
            f"append-{_latents(config)}-{config.rope_pairing}{runs}",
            append_spec(config, arch, few=few, run_tokens=run_tokens),
            SHORT[config.dtype],
        )


def _read_jobs(config: MlaConfig, arch: str) -> Iterator[Job]:
    width, size = config.stored.row(config)[1], config.block_size
    word = torch.uint8 if config.is_fp8 else config.dtype
    tails = copy_tails_spec(word, width, size, config.stored.scales_per_block(size))
    for name, spec in (("gather", gather_spec(config, arch)), ("copy-tails", tails)):
        yield Job(f"{name}-{_latents(config)}", spec, SHORT[config.dtype])


def _latents(config: MlaConfig) -> str:
    """Return how names spell what is cached."""
    dtype = SHORT[config.dtype]
    stored = f"{dtype}-{config.cache_format}" if config.is_fp8 else dtype
    return f"r{config.kv_lora_rank}-{stored}"


def _query_jobs(arch: str) -> Iterator[Job]:
    """Yield what turns queries, quantises them, and merges and divides their answers."""
    for dtype, dims, rope in itertools.product(DTYPE_NAMES.values(), DIMS, _ROPES):
        of = next(of for of in types() if of.dtype == dtype)
        name = f"{dtype}-{dims}-{rope}"
        config = config_of(
            of,
            dims,
            num_heads=drawn(f"heads {name}", HEADS),
            rope=rope,
        )
        if dims == SERVED or dims == drawn(f"{dtype}-{rope}", _OTHER_DIMS):
            yield from _quantise_jobs(config, arch)
        if rope is not None and dims[0] == SERVED[0]:
            yield _rotate_job(config, arch)
        if rope is None and dims[1] == SERVED[1]:
            short = SHORT[config.dtype]
            yield Job(f"merge-lines-r{dims[0]}-{short}", merge_lines_spec(config), short)
            yield Job(f"merge-r{dims[0]}", merge_spec(dims[0]), "fp32")
    yield Job("draft-rows", draft_rows_spec(), "i32")
    for world, interleave in itertools.product((2, 3, 8), (1, 64)):
        rows = drawn(f"rows {world} {interleave}", ROWS)
        config = config_of(next(types()), SERVED, max_rows=rows)
        yield Job("shard", shard_spec(config, world, interleave), "i32")


def _rotate_job(config: MlaConfig, arch: str) -> Job:
    spec = rotate_spec(config, arch)
    overlap = "overlapped" if spec.constants["OVERLAP"] else "alone"
    return Job(
        f"rotate-{overlap}-p{config.qk_rope_head_dim}-{SHORT[config.dtype]}-{config.rope_pairing}",
        spec,
        SHORT[config.dtype],
    )


def _quantise_jobs(config: MlaConfig, arch: str) -> Iterator[Job]:
    dtype, rope = SHORT[config.dtype], config.rope_pairing
    for scale in ("data", "given"):
        spec = quantise_spec(config, arch, is_given=scale == "given")
        overlap = "overlapped" if spec.constants["OVERLAP"] else "alone"
        name = f"quantise-{overlap}-r{config.kv_lora_rank}-{dtype}-{rope}-{scale}"
        yield Job(name, spec, dtype)


def _prefill_jobs(arch: str) -> Iterator[Job]:
    """Yield every variant of prefill."""
    for dims, dtype, causal in itertools.product(_PREFILL_DIMS, DTYPE_NAMES, (True, False)):
        config = PrefillConfig(
            num_heads=drawn(f"heads {dims} {dtype}", HEADS),
            softmax_scale=1.0,
            max_rows=drawn(f"rows {dims} {dtype}", ROWS),
            max_tokens=1,
            qk_nope_head_dim=dims[0],
            qk_rope_head_dim=dims[1],
            v_head_dim=dims[2],
            dtype=dtype,
            causal=causal,
        )
        demand = (arch, DTYPE_NAMES[dtype], dims)
        variant = prefill_variant(*demand)
        mask = "causal" if causal else "non_causal"
        name = f"{'x'.join(map(str, dims))}-{SHORT[dtype]}-{mask}"
        for each in (config, replace(config, writes_empty=False)):
            yield _prefill_plan_job(each, variant.tile_m, arch)
        if not causal:
            yield from _chunk_jobs(config, variant.tile_m)
        yield Job(
            f"prefill-m{variant.tile_m}n{variant.tile_n}-{name}",
            portable_spec(config, variant),
            SHORT[config.dtype],
        )
        if is_for_hopper(*demand):
            yield Job(f"hopper-prefill-{name}", hopper_prefill_spec(config), SHORT[config.dtype])


def _prefill_plan_job(config: PrefillConfig, tile_m: int, arch: str) -> Job:
    mask = "causal" if config.causal else "non_causal"
    return Job(
        f"prefill-plan-m{tile_m}-{mask}{'' if config.writes_empty else '-chunk'}",
        plan_spec(config, tile_m, arch),
        "i32",
    )


def _chunk_jobs(config: PrefillConfig, tile_m: int) -> Iterator[Job]:
    """Yield what chunks of context need beyond a prefill that is not causal."""
    yield Job("part", part_spec(config.max_rows), "i32")
    dtype = SHORT[config.dtype]
    name = f"merge-tiles-m{tile_m}-v{config.v_head_dim}-{dtype}"
    yield Job(name, merge_tiles_spec(tile_m, config), dtype)
