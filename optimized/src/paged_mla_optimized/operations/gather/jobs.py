"""The variants of the gather kernel that are compiled for an architecture."""

from __future__ import annotations

from collections.abc import Iterator

from paged_mla_optimized.operations.gather.launch import gather_spec
from paged_mla_optimized.planning.axes import latents, read_configs
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield every variant."""
    for config in read_configs():
        yield NamedSpec(f"gather-{latents(config)}", gather_spec(config, arch), SHORT[config.dtype])
