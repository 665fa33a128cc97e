"""The variants of the plan's kernels that are compiled for an architecture.

They cover every spelling of a mask, for dense inputs and for inputs of any strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from paged_mla_optimized.config.attention import MASKS, MlaConfig
from paged_mla_optimized.planning.axes import (
    BLOCKS,
    CUTS,
    ROWS,
    Types,
    config_of,
    cut,
    drawn,
    numbers_of,
    portable_tiles,
)
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_optimized.planning.plan import schedule_spec, token_spec
from paged_mla_optimized.runtime.kernel_spec import STRIDE, NamedSpec

_NUM_SMS = 132  # affects only a division in the kernels


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield the kernels of a plan, for dense inputs and for inputs of any strides."""
    tiles: dict[AttendVariant, tuple[Types, tuple[int, int], list[int]]] = {}
    for of, every_dims, variant, heads in portable_tiles(arch):
        tiles.setdefault(variant, (of, every_dims[0], heads))
    for variant, (of, dims, heads) in tiles.items():
        for mask, is_fixed in itertools.product(MASKS, CUTS):
            name = f"m{variant.tile_m}n{variant.tile_n}x{variant.lanes}-{mask}-{cut(is_fixed)}"
            capacities = numbers_of(f"{name}-{variant.overhead}-{variant.split_tiles}", mask)
            config = config_of(
                of,
                dims,
                num_heads=drawn(f"heads {name}", heads),
                block_size=drawn(f"blocks {name}", BLOCKS[3::4]),
                mask=mask,
                batch_invariant=is_fixed,
                **capacities,
            )
            yield from _plan_jobs_of(config, variant)
            if variant.tile_m == 16:  # few rows give the shortest binary searches
                for max_rows in ROWS[:3]:
                    yield from _plan_jobs_of(replace(config, max_rows=max_rows), variant)


def _plan_jobs_of(config: MlaConfig, variant: AttendVariant) -> Iterator[NamedSpec]:
    tile = f"m{variant.tile_m}n{variant.tile_n}"
    of_step = f"{config.mask}-{cut(config.batch_invariant)}-rows{config.max_rows}"
    schedule, token = f"schedule-{tile}x{variant.lanes}-{of_step}", f"token-{tile}-{of_step}"
    strided = {"stride": STRIDE, "ids": "*i64"}  # request ids are int32 or int64
    yield NamedSpec(schedule, schedule_spec(config, variant, _NUM_SMS), "i32")
    yield NamedSpec(
        f"{schedule}-strided", schedule_spec(config, variant, _NUM_SMS, **strided), "i32"
    )
    yield NamedSpec(token, token_spec(config, variant), "i32")
    yield NamedSpec(f"{token}-strided", token_spec(config, variant, stride=STRIDE), "i32")
