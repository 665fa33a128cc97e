"""The variants of the append kernels that a step can get, compiled for an architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.append.launch import append_choices, append_spec
from paged_mla_optimized.planning.axes import (
    BLOCKS,
    LONG_BLOCK,
    OTHER_DIMS,
    ROPES,
    SERVED,
    cached,
    config_of,
    drawn,
    latents,
)
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec
from paged_mla_shared.formats import FORMATS


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield every variant; some occur several times."""
    for of, is_served, rope in itertools.product(cached(), (True, False), ROPES):
        multiple = FORMATS[of.cache_format].block_size_multiple
        blocks = [size for size in BLOCKS if size % multiple == 0 and size < LONG_BLOCK // 2]
        name = f"{of}-{is_served}-{rope}"
        dims = SERVED if is_served else drawn(f"dims {name}", OTHER_DIMS)
        for block_size in (drawn(f"blocks {name}", blocks), LONG_BLOCK):
            config = config_of(of, dims, block_size=block_size, rope=rope)
            yield from _append_jobs(config, arch)


def _append_jobs(config: MlaConfig, arch: str) -> Iterator[NamedSpec]:
    for few, run_tokens in append_choices(config):
        runs = f"-runs{run_tokens}" if run_tokens > 0 else ""
        yield NamedSpec(
            f"append-{latents(config)}-{config.rope_pairing}{runs}",
            append_spec(config, arch, few=few, run_tokens=run_tokens),
            SHORT[config.dtype],
        )
