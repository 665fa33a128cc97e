"""The variants of the kernels that rotate and quantize queries, compiled for an architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paged_mla_optimized.config.attention import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.operations.queries.quantize import quantize_spec
from paged_mla_optimized.operations.queries.rotate import rotate_spec
from paged_mla_optimized.planning.axes import DIMS, OTHER_DIMS, ROPES, SERVED, drawn, query_config
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield every variant; some occur several times."""
    for dtype, dims, rope in itertools.product(DTYPE_NAMES.values(), DIMS, ROPES):
        config = query_config(dtype, dims, rope)
        if dims == SERVED or dims == drawn(f"{dtype}-{rope}", OTHER_DIMS):
            yield from _quantize_jobs(config, arch)
        if rope is not None and dims[0] == SERVED[0]:
            yield _rotate_job(config, arch)


def _rotate_job(config: MlaConfig, arch: str) -> NamedSpec:
    spec = rotate_spec(config, arch)
    overlap = "overlapped" if spec.constants["OVERLAP"] else "alone"
    return NamedSpec(
        f"rotate-{overlap}-p{config.qk_rope_head_dim}-{SHORT[config.dtype]}-{config.rope_pairing}",
        spec,
        SHORT[config.dtype],
    )


def _quantize_jobs(config: MlaConfig, arch: str) -> Iterator[NamedSpec]:
    dtype, rope = SHORT[config.dtype], config.rope_pairing
    for scale in ("data", "given"):
        spec = quantize_spec(config, arch, is_given=scale == "given")
        overlap = "overlapped" if spec.constants["OVERLAP"] else "alone"
        name = f"quantize-{overlap}-r{config.kv_lora_rank}-{dtype}-{rope}-{scale}"
        yield NamedSpec(name, spec, dtype)
