"""Rotary embedding with both pairings, and YaRN (S-12)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paged_mla_shared.problem import Problem, Rope, RopePairing, Yarn


class Rotation:
    """What a runner rotates."""

    problem: Problem
    dtype: torch.dtype

    def turn_keys(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        """Return a step's keys as they are cached, [T, P] (S-12)."""
        return self.rotate(k_pe, positions)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x`, [T, .., P], rotated and rounded if the problem has a rope (S-12)."""
        rope = self.problem.rope
        if rope is None:
            return x
        angles = positions[:, None].double() * self.frequencies(rope, x.shape[-1])  # [T, P/2]
        angles = angles.view(len(x), *(1,) * (x.dim() - 2), -1)
        size = magnitude(rope.yarn)
        cos, sin = (angles.cos() * size).float(), (angles.sin() * size).float()
        if rope.pairing is RopePairing.INTERLEAVED:
            first, second = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
        else:
            first, second = x.float().chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        if rope.pairing is RopePairing.INTERLEAVED:
            return torch.stack(turned, dim=-1).flatten(-2).to(self.dtype)
        return torch.cat(turned, dim=-1).to(self.dtype)

    def frequencies(self, rope: Rope, dim: int) -> Tensor:
        """Return radians per position of each pair, float64 [dim / 2]."""
        base: Tensor = rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if rope.yarn is None:
            return base
        slowed = self.ramp(rope.theta, rope.yarn, dim)
        return base * (1 - slowed) + base / rope.yarn.factor * slowed

    def ramp(self, theta: float, yarn: Yarn, dim: int) -> Tensor:
        """Return how far yarn slows each pair, 0 to 1, float64 [dim / 2]."""
        ends = (
            dim
            * math.log(yarn.original_max_position / (beta * 2 * math.pi))
            / (2 * math.log(theta))
            for beta in (yarn.beta_fast, yarn.beta_slow)
        )
        low, high = next(ends), next(ends)
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64)
        return ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def magnitude(yarn: Yarn | None) -> float:
    """Return yarn's factor on cos and sin (S-12)."""
    if yarn is None or yarn.factor <= 1:
        return 1.0
    log = 0.1 * math.log(yarn.factor)
    return (log * yarn.mscale + 1) / (log * yarn.mscale_all_dim + 1)
