"""Measure the time of the checks of a step: ``python -m paged_mla_optimized.tools.check_cost``.

The step is a decode step of 256 rows of 4096 tokens in blocks of 64. Without a cache the times are
those of the checks of a plan; with a cache they are those of the first layer. On a CPU the times
are those of the host; on a GPU they include copies and waiting.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache, as_cache, empty_cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.steps import check_step_values

ROWS, SEQ_LEN, BLOCK_SIZE, REPEATS = 256, 4096, 64, 20


def milliseconds(cache_format: str, device: str, *, has_cache: bool) -> float:
    """Return the median milliseconds of one check."""
    config = MlaConfig(
        num_heads=128,
        softmax_scale=192**-0.5,
        block_size=BLOCK_SIZE,
        max_rows=ROWS,
        max_query_tokens=ROWS,
        max_model_len=SEQ_LEN,
        cache_format=cache_format,
    )
    blocks = ROWS * SEQ_LEN // BLOCK_SIZE
    starts = torch.arange(ROWS + 1, dtype=torch.int32, device=device)
    lens = torch.full((ROWS,), SEQ_LEN, dtype=torch.int32, device=device)
    table = torch.randperm(blocks, device=device).int().view(ROWS, -1)
    cache: LatentCache | None = None
    if has_cache:
        cache = as_cache(cache_format, empty_cache(config, blocks, device))
        if cache.scales is not None:
            cache.scales.fill_(1.0)
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step = MlaStep(starts, lens, table, num_tokens=ROWS)
        check_step_values(config, step, num_blocks=blocks, cache=cache)
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def main() -> None:
    """Print a line for each kind of check."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for cache_format, has_cache in (("bf16", False), ("fp8_e4m3", True), ("fp8_block_token", True)):
        given = f"with a cache of format {cache_format}" if has_cache else "without a cache"
        cost = milliseconds(cache_format, device, has_cache=has_cache)
        sys.stdout.write(f"{cost:6.1f} ms on {device}, {given}\n")


if __name__ == "__main__":
    main()
