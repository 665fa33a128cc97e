"""The kernel variants of drafts that are compiled for an architecture."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paged_mla_optimized.planning.axes import latents, read_configs
from paged_mla_optimized.runtime.kernel_spec import SHORT, NamedSpec
from paged_mla_optimized.serving.drafts import copy_tails_spec, draft_rows_spec


def jobs(_arch: str) -> Iterator[NamedSpec]:
    """Yield every kernel variant."""
    for config in read_configs():
        width, size = config.stored.row(config)[1], config.block_size
        word = torch.uint8 if config.is_fp8 else config.dtype
        spec = copy_tails_spec(word, width, size, config.stored.scales_per_block(size))
        yield NamedSpec(f"copy-tails-{latents(config)}", spec, SHORT[config.dtype])
    yield NamedSpec("draft-rows", draft_rows_spec(), "i32")
