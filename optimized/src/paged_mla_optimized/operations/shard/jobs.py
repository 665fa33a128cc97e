"""The variants of the kernel that divides keys between ranks, compiled for an architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paged_mla_optimized.operations.shard.launch import shard_spec
from paged_mla_optimized.planning.axes import ROWS, SERVED, config_of, drawn, types
from paged_mla_optimized.runtime.kernel_spec import NamedSpec


def jobs(_arch: str) -> Iterator[NamedSpec]:
    """Yield variants for several numbers of ranks and interleaves, all with one name."""
    for world, interleave in itertools.product((2, 3, 8), (1, 64)):
        rows = drawn(f"rows {world} {interleave}", ROWS)
        config = config_of(next(types()), SERVED, max_rows=rows)
        yield NamedSpec("shard", shard_spec(config, world, interleave), "i32")
