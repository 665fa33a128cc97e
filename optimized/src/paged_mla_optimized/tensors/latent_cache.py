"""One layer's paged cache as an object: latents in some format, and the scales beside them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from paged_mla_optimized.config.arguments import (
    check_at_least,
    check_between,
    check_kind,
    device_of,
)
from paged_mla_optimized.config.attention import TORCH_DTYPES, MlaConfig
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import ScaleTensor

ROW_DTYPES = TORCH_DTYPES | {"float8_e4m3": torch.float8_e4m3fn, "uint8": torch.uint8}
"""Element types of rows, by the names that ``CacheFormat.row`` has for them."""


class LatentCache(NamedTuple):
    """A paged cache (S-11).

    Parameters
    ----------
    format : str
        Key of :data:`paged_mla_shared.formats.FORMATS`; the config's.
    latents : [num_blocks, block_size, width]
        Rows as the format has them; any strides, the last one 1. A plain format's rows are R + P
        elements of the config's dtype. FP8 rows are ``torch.float8_e4m3fn`` if they are nothing
        else, or ``torch.uint8`` of the same bytes.
    scales : float32 or None
        The format's scale tensor: [num_blocks, 1, G], the last stride 1; [] for one of the layer;
        or ``None``.
    """

    format: str
    latents: torch.Tensor
    scales: torch.Tensor | None = None


Cache: TypeAlias = torch.Tensor | LatentCache
"""What engines hand over: latents alone are a cache whose format keeps no scales beside them."""


def empty_cache(config: MlaConfig, num_blocks: int, device: str | torch.device) -> LatentCache:
    """Return a cache of the config's format, all zeros; the scale of a layer is 1.

    Raises
    ------
    InvalidArgument
        `config` is no :class:`MlaConfig`, `num_blocks` no integer from 0 to 2^31 - 1, which block
        tables can name, or `device` no device.
    """
    check_kind("config", config, MlaConfig)
    device = device_of(device)
    check_between(0, 2**31 - 1, num_blocks=num_blocks)
    stored = config.stored
    dtype, width = stored.row(config)
    shape = (num_blocks, config.block_size, width)
    latents = torch.zeros(shape, dtype=ROW_DTYPES[dtype], device=device)
    scales = stored.scale_shape(num_blocks, config.block_size)
    if scales is not None:
        fill = torch.zeros if scales else torch.ones
        return LatentCache(stored.name, latents, fill(scales, device=device))
    return LatentCache(stored.name, latents)


def as_cache(cache_format: str, cache: Cache) -> LatentCache:
    """Return `cache` as the object that kernels are launched with.

    Raises
    ------
    InvalidArgument
        It is of another format.
    """
    if isinstance(cache, torch.Tensor):
        cache = LatentCache(cache_format, cache)
    else:
        _check_kinds(cache)
    if cache.format != cache_format:
        raise InvalidArgument("cache", f"format {cache.format}", cache_format)
    latents = as_bytes(cache.latents)
    return cache if latents is cache.latents else cache._replace(latents=latents)


def is_of_format(config: MlaConfig, cache: Cache) -> bool:
    """Return whether a cache is one that a config's kernels may read."""
    if isinstance(cache, LatentCache):
        return cache.format == config.cache_format
    is_bare = config.stored.scale_tensor is ScaleTensor.NONE
    return is_bare and as_bytes(cache).dtype is (torch.uint8 if config.is_fp8 else config.dtype)


def _check_kinds(cache: LatentCache) -> None:
    """Check that a cache which is no tensor is an object of some."""
    check_kind("cache", cache, torch.Tensor, LatentCache)
    check_kind("cache.latents", cache.latents, torch.Tensor)
    if cache.scales is not None:
        check_kind("cache.scales", cache.scales, torch.Tensor)


def as_bytes(latents: torch.Tensor) -> torch.Tensor:
    """Return e4m3 latents as their bytes: not every architecture has pointers to e4m3."""
    return latents.view(torch.uint8) if latents.dtype is torch.float8_e4m3fn else latents


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    """Return everything of a cache that has an address."""
    if isinstance(cache, torch.Tensor):
        return [cache]
    _check_kinds(cache)
    return [cache.latents] if cache.scales is None else [cache.latents, cache.scales]


def named_tensors(cache: LatentCache) -> dict[str, torch.Tensor | None]:
    """Return both tensors of a cache, by the names that errors have for them."""
    return {"cache": cache.latents, "cache.scales": cache.scales}


def scales_and_stride(cache: LatentCache) -> tuple[torch.Tensor, int]:
    """Return what kernels take for scales, and how far those of one block are from the next's.

    A kernel of a format without a scale tensor gets some other tensor, and reads none of it.
    """
    scales = cache.latents if cache.scales is None else cache.scales
    return scales, 0 if scales.dim() == 0 or cache.scales is None else scales.stride(0)


def tensors_of_blocks(cache: Cache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a copy of a block copies: rows, as bytes if FP8, and the block's own scales."""
    if isinstance(cache, torch.Tensor):
        return as_bytes(cache), None
    _check_kinds(cache)
    scales = cache.scales
    return as_bytes(cache.latents), scales if scales is not None and scales.dim() > 0 else None


def blocks_of_cache(num_blocks: int | None, cache: LatentCache | None) -> int | None:
    """Return how many blocks a cache has, by its number or itself; ``None`` if neither is known.

    Raises
    ------
    InvalidArgument
        Fewer than one, or both, and they differ.
    """
    if num_blocks is not None:
        check_at_least(1, num_blocks=num_blocks)
    if cache is None:
        return num_blocks
    blocks = cache.latents.shape[0]
    if num_blocks not in {None, blocks}:
        raise InvalidArgument("num_blocks", num_blocks, f"{blocks}, as the cache has, or None")
    return blocks
