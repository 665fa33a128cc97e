"""One layer's paged cache as an object: latents in some format, and the scales beside them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from paged_mla_shared.errors import InvalidArgument


class LatentCache(NamedTuple):
    """A paged cache (S-11).

    Parameters
    ----------
    format : str
        Key of :data:`paged_mla_shared.formats.FORMATS`; the config's.
    latents : [num_blocks, block_size, width]
        Rows as the format has them; any strides, the last one 1. A plain format's rows are R + P
        elements of the config's dtype.
    scales : float32 or None
        The format's scale tensor: [num_blocks, 1, G], [] for one of the layer, or ``None``.
    """

    format: str
    latents: torch.Tensor
    scales: torch.Tensor | None = None


Cache: TypeAlias = torch.Tensor | LatentCache
"""What engines hand over: latents alone are a cache whose format keeps no scales beside them."""


def as_cache(cache_format: str, cache: Cache) -> LatentCache:
    """Return `cache` as the object that kernels are launched with.

    Raises
    ------
    InvalidArgument
        It is of another format.
    """
    if isinstance(cache, torch.Tensor):
        return LatentCache(cache_format, cache)
    if cache.format != cache_format:
        raise InvalidArgument("cache", f"format {cache.format}", cache_format)
    return cache


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    """Return everything of a cache that has an address."""
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [cache.latents] if cache.scales is None else [cache.latents, cache.scales]
