"""Caches of every format that ``append`` wrote, and the values in them."""

from __future__ import annotations

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.append.launch import Append
from paged_mla_optimized.tensors.latent_cache import LatentCache, as_cache, empty_cache
from paged_mla_optimized.tools.bench.cases import R
from paged_mla_shared.formats import FORMATS

FLAT = "fp8_e4m3"
FP8_NAMES = tuple(name for name, stored in FORMATS.items() if not stored.is_plain)
_LARGEST = 448.0


def written(
    config: MlaConfig, latents: torch.Tensor, slots: torch.Tensor, num_blocks: int
) -> LatentCache:
    """Return a cache into which ``append`` wrote tokens [N, R + P] at slots [N].

    A flat FP8 cache has the smallest scale with which no value saturates.
    """
    cache = empty_cache(config, num_blocks, latents.device)
    if config.cache_format == FLAT:
        cache = cache._replace(scales=latents.abs().max().float() / _LARGEST)
    core = Core(config, latents.device)
    Append(config, core.facts.arch, core.tables).launch(
        latents[:, :R],
        latents[:, R:],
        as_cache(config.cache_format, cache),
        slot_mapping=slots,
        planned_rows=1,
        positions=torch.zeros_like(slots),
    )
    return cache


def held(cache: LatentCache) -> torch.Tensor:
    """Return the values of a cache (S-11), float64 [num_blocks, block_size, R + P]."""
    stored = FORMATS[cache.format]
    if stored.is_plain:
        return cache.latents.double()
    rows = cache.latents.view(torch.uint8)
    if stored.inline_scales:
        codes, scales, keys = rows.tensor_split((R, R + 4 * stored.inline_scales), dim=2)
        values = codes.contiguous().view(torch.float8_e4m3fn).double()
        shares = values.view(*values.shape[:2], stored.inline_scales, -1)
        shares = shares * scales.contiguous().view(torch.float32).double()[..., None]
        return torch.cat([shares.flatten(2), keys.contiguous().view(torch.bfloat16)], dim=2)
    assert cache.scales is not None
    scales = cache.scales.double()
    if scales.dim():
        scales = scales[:, 0].repeat_interleave(rows.shape[1] // scales.shape[2], 1)[..., None]
    return rows.view(torch.float8_e4m3fn).double() * scales
