"""Caches of any format: random tokens in the slots of rows, and a filling elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from machine import ON_GPU, as_bits

from paged_mla_adapters.guards import Guards
from paged_mla_optimized import LatentCache, MlaConfig
from paged_mla_optimized.tensors.latent_cache import ROW_DTYPES

NUM_BLOCKS = 96 if ON_GPU else 36  # more than most steps use


def group_size(config: MlaConfig) -> int:
    """Return the number of slots whose common scale depends on all of them; 1 in other formats."""
    per_block = config.stored.scales_per_block(config.block_size)
    return config.block_size // per_block if config.stored.couples_tokens else 1


def new_cache(
    config: MlaConfig, guards: Guards, seed: int, live: Iterable[int] | None, filling: int
) -> LatentCache:
    """Return a cache between guard zones.

    Parameters
    ----------
    live : slots that hold tokens, which are the same for every filling; ``None`` for all slots
    filling : int
        The byte in all other memory.
    """
    generator = torch.Generator().manual_seed(seed)
    stored, size = config.stored, config.block_size
    dtype_name, width = stored.row(config)
    rows = torch.randn((NUM_BLOCKS, size, width), generator=generator)
    if stored.inline_scales:
        rank, shares = config.kv_lora_rank, stored.inline_scales
        codes = rows[..., :rank].to(torch.float8_e4m3fn).view(torch.uint8)
        scales = 0.35 + torch.rand((NUM_BLOCKS, size, shares), generator=generator)
        k_pe = torch.randn((NUM_BLOCKS, size, config.qk_rope_head_dim), generator=generator)
        parts = codes, scales.view(torch.uint8), k_pe.bfloat16().view(torch.uint8)
        latents = torch.cat(parts, dim=-1)
    elif config.is_fp8:
        latents = rows.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        latents = rows.to(ROW_DTYPES[dtype_name])
    shape = stored.scale_shape(NUM_BLOCKS, size)
    scales = None if shape is None else 0.35 + torch.rand(shape, generator=generator)
    if live is not None:
        dead = torch.ones(NUM_BLOCKS * size, dtype=torch.bool)
        dead[[*live]] = False
        dead = dead.view(-1, group_size(config)).all(1).repeat_interleave(group_size(config))
        latents.view(torch.uint8).flatten(0, 1)[dead] = filling
        if scales is not None and scales.ndim:
            share = size // scales.shape[2]
            unread = dead.view(-1, share).all(1).view(scales.shape)
            scales.view(torch.uint8).view(*scales.shape, 4)[unread] = filling
    gap = (seed % 2) * width  # one token's width between two blocks, or none
    stride = (size * width + gap, width, 1)
    placed = guards.place("cache", latents, stride=stride, written=True)
    if scales is not None:
        scales = guards.place("cache.scales", scales, written=scales.ndim > 0)
    return LatentCache(config.cache_format, placed, scales)


def bits_of_slots(config: MlaConfig, cache: LatentCache) -> torch.Tensor:
    """Return the bytes of each group of slots, followed by its scales, on the CPU."""
    size = group_size(config)
    rows = (
        as_bits(cache.latents).view(torch.uint8).reshape(NUM_BLOCKS * config.block_size // size, -1)
    )
    parts = [rows.cpu()]
    if cache.scales is not None and cache.scales.ndim:
        parts.append(as_bits(cache.scales).view(torch.uint8).view(len(rows), -1).cpu())
    return torch.cat(parts, dim=1)


def rows_of_slots(cache: LatentCache, slots: list[int]) -> torch.Tensor:
    """Return the tokens at slots of a plain cache, and zeros for slots outside the cache."""
    latents = (
        cache.latents.flatten(0, 1)
        if cache.latents.is_contiguous()
        else (cache.latents.reshape(-1, cache.latents.shape[2]))
    )
    at = torch.tensor(slots, dtype=torch.int64)
    known = (at >= 0) & (at < len(latents))
    found = latents.cpu()[at.where(known, 0)]
    return found.where(known[:, None], torch.zeros((), dtype=found.dtype))
