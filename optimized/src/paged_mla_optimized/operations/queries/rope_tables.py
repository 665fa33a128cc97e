"""The cosine and sine tables by which kernels rotate queries and keys (rule S-12)."""

from __future__ import annotations

import math

import torch

from paged_mla_shared.problem import Rope, Yarn
from paged_mla_shared.rope import legal_rope, yarn_mscale


def rope_tables(
    rope: Rope, dim: int, max_model_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``cos`` and ``sin`` [max_model_len, dim / 2] for the rotation of rows of `dtype`.

    The tables are float32, or float64 for float32 rows, so that every bit of a rotated row is
    correct. With YaRN both are multiplied by the ratio of its two magnitudes.

    Angles are computed in float64, since float32 angles are wrong by a hundredth of a radian at
    positions past 100 000.

    Raises
    ------
    InvalidArgument
        A parameter of `rope` is outside its range.
    """
    rope = legal_rope(rope)
    frequencies = _frequencies(rope, dim)  # [P / 2]
    positions = torch.arange(max_model_len, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * frequencies[None, :]
    scale = 1.0
    if rope.yarn is not None:
        scale = yarn_mscale(rope.yarn.factor, rope.yarn.mscale)
        scale /= yarn_mscale(rope.yarn.factor, rope.yarn.mscale_all_dim)
    table_dtype = torch.float64 if dtype is torch.float32 else torch.float32
    return (angles.cos() * scale).to(table_dtype), (angles.sin() * scale).to(table_dtype)


def _frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Return the radians per position of each pair, float64 [P / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    plain = rope.theta**-exponents
    if rope.yarn is None:
        return plain
    low, high = _correction_range(rope.yarn, dim, rope.theta)
    pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    interpolated = ((pairs - low) / (high - low)).clamp(0, 1)  # 0: as trained, 1: stretched
    return plain / rope.yarn.factor * interpolated + plain * (1 - interpolated)


def _correction_range(yarn: Yarn, dim: int, theta: float) -> tuple[float, float]:
    """Return the range of pairs with partial interpolation (DeepSeek's find_correction_range)."""

    def pair_of(rotations: float) -> float:
        period = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(theta))

    low = max(float(math.floor(pair_of(yarn.beta_fast))), 0.0)
    high = min(float(math.ceil(pair_of(yarn.beta_slow))), dim - 1.0)
    return low, high + 0.001 if low == high else high
