"""Check the scales that a step reads in an FP8 cache (rule S-11)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.values.blocks import Table
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import ScaleTensor

_SCALE_BYTES = 4
_ARGUMENT = "cache.scales"
_ALLOWED = "a finite number > 0; refill a cache that lost its scales, for example in sleep mode"


def check_scales_read(
    config: MlaConfig, cache: LatentCache, table: Table, lens: NDArray[np.integer]
) -> None:
    """Raise ``InvalidArgument`` if the scale of a key that is read is 0, negative, NaN or infinite.

    A scale of the whole layer is checked even if no key is read.

    Parameters
    ----------
    config : MlaConfig
    cache : LatentCache
        A cache of the config's format, with rows as bytes.
    table : Table
        A table whose blocks the cache has.
    lens : int [B]
        The number of leading keys of each row that are read, at most its ``seq_len``.
    """
    stored = config.stored
    if stored.scale_tensor is ScaleTensor.SCALAR:
        check_layer_scale(cache.scales)
        return
    if stored.scale_tensor is ScaleTensor.NONE and not stored.inline_scales:
        return
    blocks, rows, columns = table.used
    counts = np.clip(np.asarray(lens, np.int64)[rows] - columns * config.block_size, 0, None)
    blocks, rows, columns, counts = (x[counts > 0] for x in (blocks, rows, columns, counts))
    if not len(blocks):
        return
    ids, at = np.unique(blocks, return_inverse=True)
    tokens = np.zeros(len(ids), np.int64)  # the tokens of each block that are read
    np.maximum.at(tokens, at, np.minimum(counts, config.block_size))
    scales = _scales_of(config, cache, ids)  # [blocks, scales, scales of one token]
    share = config.block_size // scales.shape[1]  # tokens that have one scale
    first_tokens = np.arange(scales.shape[1]) * share
    is_read = (first_tokens < tokens[:, None])[..., None]
    lost = is_read & ~((scales > 0) & np.isfinite(scales))
    if lost.any():
        block, token, part = np.argwhere(lost)[0].tolist()
        row = int(rows[at == block][0])
        slot = int(ids[block]) * config.block_size + token * share
        of = f", part {part} of the latent" if stored.inline_scales else ""
        given = (
            f"{scales[block, token, part]} for slot {slot} in block {ids[block]}, which row {row} "
            f"reads{of}"
        )
        raise InvalidArgument(_ARGUMENT, given, _ALLOWED)


def check_layer_scale(scale: torch.Tensor | None, layer: int | None = None) -> None:
    """Raise ``InvalidArgument`` if the one float32 scale of a layer is missing, not finite or <= 0.

    The message contains the number `layer`, if there is one.
    """
    value = np.nan if scale is None else float(scale)
    if not (np.isfinite(value) and value > 0):
        of = "the layer" if layer is None else f"layer {layer}"
        raise InvalidArgument(_ARGUMENT, f"{value} for {of}", _ALLOWED)


def _scales_of(
    config: MlaConfig, cache: LatentCache, ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the scales of blocks, float32 [n, scales per block, scales per token]."""
    wanted = torch.from_numpy(ids).to(cache.latents.device)
    if cache.scales is not None:
        scales = cache.scales[:, 0].index_select(0, wanted)[..., None]
        return np.asarray(scales.cpu().numpy())
    field = next(f for f in config.stored.fields(config) if f.name == "ckv_scale")
    inside = cache.latents[..., field.offset : field.offset + field.count * _SCALE_BYTES]
    held = inside.index_select(0, wanted).cpu().contiguous()
    return np.asarray(held.view(torch.float32).numpy())
