"""What layers of engines hand over, as ``attend`` takes it: no engine here."""

from __future__ import annotations

import torch

from paged_mla_optimized.tensors.latent_cache import Cache, LatentCache

FLAT_FP8 = "fp8_e4m3"
"""The format of ``--kv-cache-dtype fp8``: codes alone, and one scale of the layer."""


def split_queries(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return absorbed queries [T, H, R] and rotated ones [T, H, P].

    Some paths of engines join them, as vLLM before it gathers the heads of all ranks.
    """
    if isinstance(q, tuple):
        return q
    return q[..., :kv_lora_rank], q[..., kv_lora_rank:]


def as_cache(stored: str, latents: torch.Tensor, k_scale: torch.Tensor) -> Cache:
    """Return a layer's cache as ``attend`` takes it.

    Parameters
    ----------
    stored : str
        Key of ``FORMATS``: a plain one, or :data:`FLAT_FP8`.
    latents : [num_blocks, block_size, R + P]
        Any strides: vLLM may keep all layers of a block together.
    k_scale : float32 [] or [1]
        Of the layer, on the device. It counts for FP8 alone: other caches have one too.
    """
    if stored != FLAT_FP8:
        return latents
    return LatentCache(stored, latents, k_scale.view(()))
