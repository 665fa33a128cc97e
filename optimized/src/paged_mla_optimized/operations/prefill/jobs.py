"""The variants of the prefill kernels that are compiled for an architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.prefill.hopper import hopper_prefill_spec
from paged_mla_optimized.operations.prefill.key_chunks import key_chunk_spec
from paged_mla_optimized.operations.prefill.portable import plan_spec, portable_spec
from paged_mla_optimized.planning.axes import HEADS, ROWS, drawn
from paged_mla_optimized.planning.prefill import is_for_hopper, prefill_variant
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec

_PREFILL_DIMS = (  # head sizes: keys without and with position, values
    *((128, 64, 128), (192, 64, 256)),  # DeepSeek's and GLM's
    # the smallest sizes; a size that is not a power of two; the largest sizes
    *((16, 16, 16), (48, 32, 64), (256, 64, 256)),
)


def prefill_configs() -> Iterator[PrefillConfig]:
    """Yield the configs for which prefill is compiled."""
    for dims, dtype, causal in itertools.product(_PREFILL_DIMS, DTYPE_NAMES, (True, False)):
        yield PrefillConfig(
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


def demand_of(config: PrefillConfig, arch: str) -> tuple[str, str, tuple[int, int, int]]:
    """Return the arguments of ``prefill_variant`` for a config."""
    dims = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    return arch, DTYPE_NAMES[config.dtype], dims


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield every variant; some occur several times."""
    for config in prefill_configs():
        demand, dtype = demand_of(config, arch), SHORT[config.dtype]
        variant = prefill_variant(*demand)
        mask = "causal" if config.causal else "non_causal"
        name = f"{'x'.join(map(str, demand[2]))}-{dtype}-{mask}"
        for each in (config, replace(config, writes_empty=False)):
            yield _prefill_plan_job(each, variant.tile_m, arch)
        if not config.causal:
            yield NamedSpec("part", key_chunk_spec(config.max_rows), "i32")
        portable = f"prefill-m{variant.tile_m}n{variant.tile_n}-{name}"
        yield NamedSpec(portable, portable_spec(config, variant), dtype)
        if is_for_hopper(*demand):
            yield NamedSpec(f"hopper-prefill-{name}", hopper_prefill_spec(config), dtype)


def _prefill_plan_job(config: PrefillConfig, tile_m: int, arch: str) -> NamedSpec:
    mask = "causal" if config.causal else "non_causal"
    return NamedSpec(
        f"prefill-plan-m{tile_m}-{mask}{'' if config.writes_empty else '-chunk'}",
        plan_spec(config, tile_m, arch),
        "i32",
    )
