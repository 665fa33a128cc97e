"""The variants of the merge kernels that are compiled for an architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.operations.merge.lines import merge_lines_spec
from paged_mla_optimized.operations.merge.partials import merge_spec
from paged_mla_optimized.operations.merge.tiles import merge_tiles_spec
from paged_mla_optimized.operations.prefill.jobs import demand_of, prefill_configs
from paged_mla_optimized.planning.axes import DIMS, SERVED, query_config
from paged_mla_optimized.planning.prefill import prefill_variant
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec


def jobs(arch: str) -> Iterator[NamedSpec]:
    """Yield every variant; some occur several times."""
    for dtype, dims in itertools.product(DTYPE_NAMES.values(), DIMS):
        if dims[1] == SERVED[1]:
            config = query_config(dtype, dims, None)
            short = SHORT[config.dtype]
            yield NamedSpec(f"merge-lines-r{dims[0]}-{short}", merge_lines_spec(config), short)
            yield NamedSpec(f"merge-r{dims[0]}", merge_spec(dims[0]), "fp32")
    for chunk in prefill_configs():
        if not chunk.causal:  # partial results of context chunks
            tile_m, short = prefill_variant(*demand_of(chunk, arch)).tile_m, SHORT[chunk.dtype]
            name = f"merge-tiles-m{tile_m}-v{chunk.v_head_dim}-{short}"
            yield NamedSpec(name, merge_tiles_spec(tile_m, chunk), short)
