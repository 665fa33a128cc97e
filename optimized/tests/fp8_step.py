"""FP8 caches to test with: S-11 once more, in torch, for whole caches at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mla_step import P, R, Step, build

from paged_mla_optimized import LatentCache
from paged_mla_shared.formats import FORMATS

NAMES = ("fp8_e4m3", "fp8_ds_mla", "fp8_block_token", "fp8_block_group")
LAYER_SCALE = 0.011  # no power of two
SHARES = 4  # of a latent, in fp8_ds_mla


def codes(x: torch.Tensor) -> torch.Tensor:
    """Return e4m3 codes of float32, uint8: saturating, NaN 0x7f."""
    found = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, found).to(torch.uint8)


def values(found: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, float64."""
    return found.view(torch.float8_e4m3fn).double()


def scale_of(x: torch.Tensor) -> torch.Tensor:
    """Return the scale of each line of numbers [..., n], float32 [...]."""
    amax = x.abs().where(x.isfinite(), 0.0).amax(-1)
    return (amax / 448).clamp(min=2.0**-126)


def as_rows(name: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the bytes of tokens, uint8 [n, width], from float32 [n, R + P] and their scales.

    `scale` is [n, 1], or [n, 4] where a row keeps its own.
    """
    if name != "fp8_ds_mla":
        return codes(x / scale)
    shares = x[:, :R].reshape(-1, SHARES, R // SHARES)
    latent = codes(shares / scale[..., None]).flatten(1)
    parts = latent, scale, x[:, R:].bfloat16()
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def values_of(name: str, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what rows with these scales hold, float64 [n, R + P]."""
    if name != "fp8_ds_mla":
        return values(rows) * scale.double()
    latent = values(rows[:, :R].contiguous()).view(-1, SHARES, R // SHARES) * scale[..., None]
    k_pe = rows[:, R + 4 * SHARES :].contiguous().view(torch.bfloat16)
    return torch.cat([latent.flatten(1), k_pe.double()], dim=1)


def scales_of(name: str, x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the scales of tokens [n, R + P], of which each `group` follow each other, [n, ..]."""
    if name == "fp8_e4m3":
        return torch.full((len(x), 1), LAYER_SCALE)
    if name == "fp8_ds_mla":
        return scale_of(x[:, :R].reshape(-1, SHARES, R // SHARES))
    together = scale_of(x.reshape(-1, group * (R + P)))
    return together.repeat_interleave(group)[:, None]


def build_fp8(name: str, *rows: tuple[int, int], magnitude: Any = 1.0, **changes: Any) -> Step:
    """Build a step as :func:`mla_step.build` does, over an FP8 cache and with keys as it has them.

    Keys are that of a plain cache times `magnitude`, of all or of those of one row. What holds no
    key holds NaN of both signs, in codes and scales.
    """
    step = build(*rows, cache_format=name, **changes)
    blocks, size, _ = step.cache.shape
    group = size // 4 if name == "fp8_block_group" else 1
    tokens = step.cache.float().view(-1, R + P)
    for row in range(len(rows)):
        tokens[slots_of(step, row)] *= torch.as_tensor(magnitude).reshape(-1, 1)
    empty = tokens.isnan().all(1)
    scale = scales_of(name, tokens.nan_to_num(0.0), group)
    stored = as_rows(name, tokens, scale)
    stored[empty] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).repeat(stored.shape[1] // 2)
    held = values_of(name, stored, scale)
    keys = [held[slots_of(step, row)] for row in range(len(rows))]
    unused = empty.view(-1, group).all(1)
    beside = scale[::group, 0].masked_fill(unused, torch.nan).view(blocks, 1, -1)
    scales = {"fp8_e4m3": torch.tensor(LAYER_SCALE), "fp8_ds_mla": None}.get(name, beside)
    return replace(
        step,
        q_nope=step.q_nope.to(step.config.dtype),
        q_pe=step.q_pe.to(step.config.dtype),
        cache=LatentCache(name, stored.view(blocks, size, -1), scales),
        keys=keys,
    )


def slots_of(step: Step, row: int) -> torch.Tensor:
    """Return the slot of each key of a row."""
    size, position = step.config.block_size, torch.arange(step.rows[row][0])
    return step.block_table[row, position // size].long() * size + position % size


def width_of(name: str) -> int:
    """Return the bytes of a row."""
    return R + 4 * SHARES + 2 * P if name == "fp8_ds_mla" else R + P


def empty_cache(name: str, blocks: int, size: int) -> LatentCache:
    """Return a cache filled with arbitrary bytes and scales."""
    latents = torch.full((blocks, size, width_of(name)), 0xA5, dtype=torch.uint8)
    shape = FORMATS[name].scale_shape(blocks, size)
    scales = None if shape is None else torch.full(shape, 7.0)
    return LatentCache(name, latents, torch.tensor(LAYER_SCALE) if shape == () else scales)
