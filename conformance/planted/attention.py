"""Attention of one row in tiles and splits, and how partials join (S-5 to S-8)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paged_mla_shared.problem import Problem

TILE_SCORES = 1 << 24  # scores held at once


class Attention:
    """What a runner computes of queries and keys."""

    problem: Problem
    split_size = 1024  # keys

    def attend_row(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return out [q, H, R] and lse [q, H] of a row, in tiles of queries and splits of keys."""
        tile = max(1, TILE_SCORES // (queries.shape[1] * len(keys)))
        outs, lses = [], []
        for tile_queries, tile_visible in zip(
            torch.split(queries, tile), torch.split(visible, tile), strict=True
        ):
            splits = zip(
                torch.split(keys, self.split_size),
                torch.split(tile_visible, self.split_size, dim=1),
                strict=True,
            )
            partials = [self.attend_split(tile_queries, k, v) for k, v in splits]
            out, lse = self.join_splits(*map(torch.stack, zip(*partials, strict=True)))
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def attend_split(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse of queries over some keys; 0 and -inf if they see none (S-5, S-6)."""
        scores = (queries @ keys.T) * self.problem.softmax_scale  # [q, H, K]
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        highest = self.highest(scores)  # [q, H, 1]
        weights = torch.exp(scores - highest)
        total = weights.sum(dim=-1, keepdim=True)
        values = keys[:, : self.problem.dims.kv_lora_rank]
        out = weights @ values / total.where(total > 0, 1.0)
        return out, (highest + total.log())[..., 0]

    def highest(self, scores: Tensor) -> Tensor:
        """Return what is taken from scores before the exponential, [q, H, 1]."""
        return finite(scores.amax(dim=-1, keepdim=True))

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Join a tile's splits, [n, q, H, R] and [n, q, H]."""
        return combine(outs, lses, lses.amax(dim=0))

    def merge_base(self, lses: Tensor) -> Tensor:
        """Return the lse that partials are weighed against, [T, H]."""
        return lses.amax(dim=0)


def combine(outs: Tensor, lses: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh partials by ``exp(lse - base)``; an empty one weighs nothing (S-8)."""
    base = finite(base)
    weights = torch.exp(lses - base)  # [n, T, H]
    outs = outs.masked_fill(lses.isneginf()[..., None], 0.0)
    total = weights.sum(dim=0)  # [T, H]
    out = (outs * weights[..., None]).sum(dim=0) / total.where(total != 0, 1.0)[..., None]
    return out, base + total.log()


def finite(lse: Tensor) -> Tensor:
    """Return `lse` with 0 for -inf, so that it can be subtracted."""
    return lse.masked_fill(lse.isneginf(), 0.0)
