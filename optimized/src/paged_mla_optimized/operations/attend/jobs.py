"""The variants of the attend kernels, and of combine, that are compiled for an architecture.

The table in ``planning/families.py``, which launches use too, determines the tiles and the head
counts that each tile serves. Every combination of these options is compiled once: tile, dtype,
cache format, products, mask, rope, whether splits have a fixed length, and how keys are copied. The
latter is the TMA box or single copies on Hopper; in portable kernels, whether a block is a whole
number of key tiles.

Every number of heads up to 128 is compiled in each tile of the Hopper kernels that serves it. For
the kernels for few queries, this is repeated for every mask, for both kinds of splits, and with and
without a box.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from paged_mla_optimized.config.attention import MASKS as SPELT_MASKS
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.argument_types import partial_dtype
from paged_mla_optimized.operations.attend.combine import combine_spec
from paged_mla_optimized.operations.attend.hopper import has_rope, hopper_box, hopper_spec
from paged_mla_optimized.operations.attend.portable import attend_spec
from paged_mla_optimized.planning.axes import (
    BLOCKS,
    CUTS,
    DIMS,
    HEADS,
    ROPES,
    SERVED,
    Types,
    config_of,
    cut,
    drawn,
    is_for_gluon,
    numbers_of,
    portable_tiles,
    served,
    short,
    types,
)
from paged_mla_optimized.planning.families import FEW, PORTABLE, AttendVariant
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Rope

_MASKS = (*SPELT_MASKS[:2], SPELT_MASKS[-1])  # only one tree mask: only the plan reads its spelling


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield every variant; some occur several times."""
    yield from _hopper_jobs(arch)
    yield from _hopper_heads(arch)
    yield from _attend_jobs(arch)


class _Tile(NamedTuple):
    """A tile of one Hopper kernel, and the steps that it serves."""

    types: Types
    dims: tuple[int, int]
    variant: AttendVariant  # one of several variants that differ only in their schedule
    heads: list[int]


class _Options(NamedTuple):
    """The other options that determine the code of a Hopper kernel."""

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


def _hopper_jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield the Hopper kernels with every combination of options."""
    names = set()  # some kernels serve both exact and fast products
    for tile in _hopper_tiles(arch):
        ropes = ROPES if has_rope(tile.variant) else ROPES[:1]
        boxes = blocks_by_box(tile.types.cache_format)
        for mask, is_fixed, rope, box in itertools.product(_MASKS, CUTS, ropes, boxes):
            options = _Options(mask, is_fixed, rope, box)
            name = _hopper_name(tile, options)
            if name not in names:
                names.add(name)
                yield _hopper_job(tile, options, drawn(f"heads {name}", tile.heads))


def _hopper_heads(arch: str) -> Iterator[NamedSpec]:
    """Yield the Hopper kernels with every number of heads."""
    tiles: dict[tuple[str, int], list[_Tile]] = {}
    for tile in _hopper_tiles(arch):
        tiles.setdefault((tile.variant.family, tile.variant.tile_m), []).append(tile)
    every = [_Options(*each) for each in itertools.product(_MASKS, CUTS, (None,), (0, 64))]
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
        f"hopper-{variant.family}-m{variant.tile_m}-r{tile.dims[0]}-{short(tile.types)}"
        f"-{_tree(options.mask)}-box{options.box}-{cut(options.is_fixed)}{rotated}"
    )


def _hopper_job(tile: _Tile, options: _Options, num_heads: int) -> NamedSpec:
    variant, name = tile.variant, _hopper_name(tile, options)
    blocks = blocks_by_box(tile.types.cache_format)[options.box]
    config = config_of(
        tile.types,
        tile.dims,
        num_heads=num_heads,
        block_size=drawn(f"blocks {name} {num_heads}", blocks),
        mask=options.mask,
        batch_invariant=options.is_fixed,
        rope=options.rope,
        **numbers_of(name, options.mask),
    )
    geometry = (
        config.block_size,
        config.stored.token_bytes(config) // 2,
        config.stored.scales_per_block(config.block_size),
    )
    return NamedSpec(
        f"{name}-h{num_heads}-b{config.block_size}",
        hopper_spec(config, variant, *geometry),
        SHORT[config.dtype],
    )


def _attend_jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield the portable attend kernel, and combine for it and for Hopper kernels."""
    for of, dims, variant, heads in portable_tiles(arch):
        widths = f"r{dims[0][0]}" if len(dims) == 1 else "others"
        tile = f"m{variant.tile_m}n{variant.tile_n}"
        blocks = blocks_by_tile(of.cache_format, variant.tile_n)
        for mask, is_fixed, is_whole in itertools.product(_MASKS, CUTS, blocks):
            keys = "blocks" if is_whole else "gather"
            name = f"{tile}-{widths}-{short(of)}-{_tree(mask)}-{keys}-{cut(is_fixed)}"
            config = config_of(
                of,
                drawn(f"dims {name}", dims),
                num_heads=drawn(f"heads {name}", heads),
                block_size=drawn(f"blocks {name}", blocks[is_whole]),
                mask=mask,
                batch_invariant=is_fixed,
                **numbers_of(name, mask),
            )
            yield _attend_job(f"attend-{name}", config, variant, arch)
            yield _combine_job(config, variant)


def _attend_job(name: str, config: MlaConfig, variant: AttendVariant, arch: str) -> NamedSpec:
    partial = SHORT[partial_dtype(config, variant)]
    rounded = f"-of-{partial}" if partial != "fp32" else ""
    return NamedSpec(
        f"{name}{rounded}-h{config.num_heads}-b{config.block_size}",
        attend_spec(config, variant, arch),
        SHORT[config.dtype],
    )


def _combine_job(config: MlaConfig, variant: AttendVariant) -> NamedSpec:
    dtype, partial = SHORT[config.dtype], SHORT[partial_dtype(config, variant)]
    overlap = "alone" if variant.family == PORTABLE else "overlapped"
    rounded = f"-of-{partial}" if partial != "fp32" else ""
    return NamedSpec(
        f"combine-{overlap}-r{config.kv_lora_rank}-{dtype}-{cut(config.batch_invariant)}{rounded}",
        combine_spec(config, variant),
        dtype,
    )


def _tree(mask: str) -> str:
    return "tree" if mask.startswith("tree") else mask


def blocks_by_box(cache_format: str) -> dict[int, list[int]]:
    """Return the legal block sizes for each number of keys of one copy on Hopper."""
    multiple = FORMATS[cache_format].block_size_multiple
    found: dict[int, list[int]] = {}
    for block_size in BLOCKS:
        if block_size % multiple == 0:
            found.setdefault(hopper_box(block_size), []).append(block_size)
    return found


def blocks_by_tile(cache_format: str, tile_n: int) -> dict[bool, list[int]]:
    """Return the legal block sizes, grouped by whether a block is a whole number of key tiles."""
    found: dict[bool, list[int]] = {}
    for sizes in blocks_by_box(cache_format).values():
        for block_size in sizes:
            found.setdefault(block_size % tile_n == 0, []).append(block_size)
    return found
