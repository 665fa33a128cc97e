"""Rule S-12: rotary embedding with both pairings and YaRN; also the softmax scale of rule S-5."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.problem import Rope, RopePairing, Yarn
from paged_mla_shared.rope import legal_rope


def rotate(x: NDArray[np.float64], positions: NDArray[np.int64], rope: Rope) -> NDArray[np.float64]:
    """Rotate queries or keys at absolute positions, once and before caching (S-12).

    The function rotates pair i of ``P / 2`` by the angle ``position * frequency[i]``, and
    multiplies it by :func:`magnitude`. With interleaved pairing, pair i has the elements
    ``(2i, 2i + 1)`` (DeepSeek's main attention). With NeoX pairing, it has the elements
    ``(i, i + P / 2)``. Each result has the place of its input.

    Parameters
    ----------
    x : float64 [T, ..., P]
    positions : int64 [T]
    rope : Rope

    Returns
    -------
    float64 [T, ..., P]
        Not rounded. Callers round to the problem's dtype.

    Raises
    ------
    InvalidArgument
        A parameter of `rope` is not in its range.
    """
    half = x.shape[-1] // 2
    angles = positions[:, None] * frequencies(rope, x.shape[-1])  # [T, P/2]
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), half)
    cos, sin = np.cos(angles) * magnitude(rope), np.sin(angles) * magnitude(rope)
    interleaved = rope.pairing == RopePairing.INTERLEAVED
    first = np.s_[..., 0::2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., half:]
    out = np.empty_like(x)
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


def frequencies(rope: Rope, dim: int) -> NDArray[np.float64]:
    """Return the frequency of each pair in radians per position, float64 [dim / 2] (S-12).

    Without YaRN, the frequency of pair i is ``theta ** (-2i / dim)``. With YaRN, pairs that rotate
    many times over the original context keep that frequency, and the frequencies of pairs that
    rotate few times are divided by ``factor``. A linear ramp connects both ranges.

    Raises
    ------
    InvalidArgument
        A parameter of `rope` is not in its range.

    Notes
    -----
    Source: arXiv:2309.00071 and DeepSeek-V3's published ``modeling_deepseek.py``.
    """
    rope = legal_rope(rope)
    base = rope.theta ** (-np.arange(0, dim, 2) / dim)  # [P/2]
    if rope.yarn is None:
        return base
    slowed = _ramp(rope.theta, rope.yarn, dim)  # [P/2], 0: unchanged, 1: divided by the factor
    return base * (1 - slowed) + base / rope.yarn.factor * slowed


def magnitude(rope: Rope) -> float:
    """Return the factor of cos and sin; 1 without YaRN and with DeepSeek-V3's settings (S-12)."""
    yarn = legal_rope(rope).yarn
    if yarn is None:
        return 1.0
    return mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's attention temperature, ``0.1 * weight * ln(factor) + 1``; 1 if factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_softmax_scale(dims: MlaDims, rope: Rope | None = None) -> float:
    """Return the model's softmax scale (S-5).

    The scale is ``(N + P) ** -0.5 * mscale(factor, mscale_all_dim) ** 2``, where ``N + P`` is the
    width of a materialized head. Without YaRN, the scale is ``(N + P) ** -0.5``. It is never
    ``(R + P) ** -0.5``: ``R + P`` is the width of an absorbed head.

    Raises
    ------
    InvalidArgument
        A parameter of `rope` is not in its range.
    """
    rope = rope and legal_rope(rope)
    scale = 1 / math.sqrt(dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    if rope is None or rope.yarn is None:
        return scale
    return scale * mscale(rope.yarn.factor, rope.yarn.mscale_all_dim) ** 2


def _ramp(theta: float, yarn: Yarn, dim: int) -> NDArray[np.float64]:
    """Return the weight of YaRN's lower frequency for each pair, 0 to 1, float64 [dim / 2]."""

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_max_position / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(float(math.floor(pair_that_turns(yarn.beta_fast))), 0.0)
    high = min(float(math.ceil(pair_that_turns(yarn.beta_slow))), dim - 1.0)
    width = high - low if high != low else 0.001  # the same guard as in the published code
    return np.clip((np.arange(dim // 2) - low) / width, 0, 1)
