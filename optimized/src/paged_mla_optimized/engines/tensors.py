"""Convert the tensors of an engine's layer to the arguments of ``attend``.

This file imports no engine.
"""

from __future__ import annotations

import torch

from paged_mla_optimized.tensors.latent_cache import Cache, LatentCache

FLAT_FP8 = "fp8_e4m3"
"""The cache format of ``--kv-cache-dtype fp8``: FP8 codes in the cache and one scale per layer."""


def split_queries(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absorbed queries [T, H, R] and the rotated queries [T, H, P].

    `q` is a pair of these two tensors or one joined tensor [T, H, R + P]. For example, vLLM joins
    them before it gathers the heads of all ranks.
    """
    if isinstance(q, tuple):
        return q
    return q[..., :kv_lora_rank], q[..., kv_lora_rank:]


def as_cache(stored: str, latents: torch.Tensor, k_scale: torch.Tensor) -> Cache:
    """Return a layer's cache in the form that ``attend`` takes.

    Parameters
    ----------
    stored : str
        A key of ``FORMATS``: a plain format or :data:`FLAT_FP8`.
    latents : [num_blocks, block_size, R + P]
        The tensor may have any strides: vLLM may store all layers of a block together.
    k_scale : float32 [] or [1]
        The scale of the layer, on the device. Engines pass one for every cache; this function uses
        it only for :data:`FLAT_FP8`.
    """
    if stored != FLAT_FP8:
        return latents
    return LatentCache(stored, latents, k_scale.view(()))
