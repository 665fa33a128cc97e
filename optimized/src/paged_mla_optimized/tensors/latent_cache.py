"""One layer's paged cache: latents in a cache format, and the tensor of their scales."""

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
"""The torch dtypes of the element types that ``CacheFormat.row`` names."""


class LatentCache(NamedTuple):
    """A paged cache (S-11).

    Parameters
    ----------
    format : str
        A key of :data:`paged_mla_shared.formats.FORMATS`; the format of the config.
    latents : [num_blocks, block_size, width]
        Cached tokens of the format; any strides, but the last stride is 1. In a plain format, a
        token is R + P elements of the config's dtype. In an FP8 format, a token is
        ``torch.float8_e4m3fn`` elements if it has only e4m3 codes, or its bytes as ``torch.uint8``.
    scales : float32 or None
        The format's scale tensor: [num_blocks, 1, G] with a last stride of 1, [] for one scale of
        the layer, or ``None`` if the format has no scale tensor.
    """

    format: str
    latents: torch.Tensor
    scales: torch.Tensor | None = None


Cache: TypeAlias = torch.Tensor | LatentCache
"""The argument type of a cache: a tensor of latents alone is a cache without a scale tensor."""


def empty_cache(config: MlaConfig, num_blocks: int, device: str | torch.device) -> LatentCache:
    """Return a cache of the config's format, filled with zeros; a scale of the layer is 1.

    Raises
    ------
    InvalidArgument
        `config` is not an :class:`MlaConfig`, `num_blocks` is not an integer from 0 to 2^31 - 1,
        or `device` is neither a device nor a device name.
    Unsupported
        The device is not available.
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
    """Return `cache` as a :class:`LatentCache`, with FP8 latents as bytes.

    Raises
    ------
    InvalidArgument
        `cache` is not a cache of tensors, or it has another format.
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
    """Return whether a cache has the format of a config.

    A tensor alone has it if the format has no scale tensor and the dtypes match.
    """
    if isinstance(cache, LatentCache):
        return cache.format == config.cache_format
    is_bare = config.stored.scale_tensor is ScaleTensor.NONE
    return is_bare and as_bytes(cache).dtype is (torch.uint8 if config.is_fp8 else config.dtype)


def _check_kinds(cache: LatentCache) -> None:
    """Check the types of a cache that is not a tensor."""
    check_kind("cache", cache, torch.Tensor, LatentCache)
    check_kind("cache.latents", cache.latents, torch.Tensor)
    if cache.scales is not None:
        check_kind("cache.scales", cache.scales, torch.Tensor)


def as_bytes(latents: torch.Tensor) -> torch.Tensor:
    """Return e4m3 latents as bytes, since not every architecture has pointers to e4m3."""
    return latents.view(torch.uint8) if latents.dtype is torch.float8_e4m3fn else latents


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    """Return the tensors of a cache: the latents and, if the format has some, the scales."""
    if isinstance(cache, torch.Tensor):
        return [cache]
    _check_kinds(cache)
    return [cache.latents] if cache.scales is None else [cache.latents, cache.scales]


def named_tensors(cache: LatentCache) -> dict[str, torch.Tensor | None]:
    """Return both tensors of a cache by the names that error messages use."""
    return {"cache": cache.latents, "cache.scales": cache.scales}


def scales_and_stride(cache: LatentCache) -> tuple[torch.Tensor, int]:
    """Return the scale tensor that kernels take, and its stride between blocks.

    For a format without a scale tensor, the latents are returned instead; kernels do not read them.
    """
    scales = cache.latents if cache.scales is None else cache.scales
    return scales, 0 if scales.dim() == 0 or cache.scales is None else scales.stride(0)


def tensors_of_blocks(cache: Cache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tensors with data of blocks: latents as bytes, and the scales of blocks if any."""
    if isinstance(cache, torch.Tensor):
        return as_bytes(cache), None
    _check_kinds(cache)
    scales = cache.scales
    return as_bytes(cache.latents), scales if scales is not None and scales.dim() > 0 else None


def blocks_of_cache(num_blocks: int | None, cache: LatentCache | None) -> int | None:
    """Return the number of blocks of a cache, from either argument; ``None`` without both.

    Raises
    ------
    InvalidArgument
        `num_blocks` is less than 1, or differs from that of `cache`.
    """
    if num_blocks is not None:
        check_at_least(1, num_blocks=num_blocks)
    if cache is None:
        return num_blocks
    blocks = cache.latents.shape[0]
    if num_blocks not in {None, blocks}:
        raise InvalidArgument(
            "num_blocks", num_blocks, f"{blocks}, the number of blocks of the cache, or None"
        )
    return blocks
