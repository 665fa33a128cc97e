"""Faults of rotation frequencies: the base, and YaRN's ramp and magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.rotation_change import (
    Array,
    Positions,
    rotating,
    turn,
    with_rope,
    with_yarn,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.rope import frequencies, magnitude, rotate
from paged_mla_shared.problem import Rope, Yarn

Ends = tuple[float, float]
TURNED = ("S-10", "S-12", "S-3", "S-5", "S-7")  # rules that detect wrong queries and keys


@kernel_fault(FaultClass.ROPE, *TURNED, cites="torchtitan#4117 prime-rl#2681")
def yarn_is_ignored(oracle: Oracle) -> Oracle:
    """YaRN is ignored: the frequencies of queries and keys are not interpolated."""
    return with_rope(oracle, lambda rope: replace(rope, yarn=None))


@kernel_fault(FaultClass.ROPE, *TURNED, cites="imp#880 sglang#22711")
def yarn_magnitude_is_one_mscale(oracle: Oracle) -> Oracle:
    """YaRN's magnitude is computed from mscale alone, not divided by that of mscale_all_dim."""
    return with_yarn(oracle, lambda yarn: replace(yarn, mscale_all_dim=0.0))


@kernel_fault(FaultClass.ROPE, *TURNED, akin="exllamav3#259")
def yarn_magnitude_is_always_1(oracle: Oracle) -> Oracle:
    """YaRN's magnitude is always 1, as if mscale and mscale_all_dim were equal."""
    return with_yarn(oracle, lambda yarn: replace(yarn, mscale=yarn.mscale_all_dim))


@kernel_fault(FaultClass.ROPE, *TURNED, akin="mlx-lm#1189")
def theta_is_always_10000(oracle: Oracle) -> Oracle:
    """The base of the rotation is always 10000."""
    return with_rope(oracle, lambda rope: replace(rope, theta=1e4))


@kernel_fault(FaultClass.ROPE, *TURNED)
def theta_is_one_of_two(oracle: Oracle) -> Oracle:
    """The base of the rotation is 1e6 if theta is above 1e5, otherwise 1e4."""
    return with_rope(oracle, lambda rope: replace(rope, theta=1e6 if rope.theta > 1e5 else 1e4))


@kernel_fault(FaultClass.ROPE, *TURNED)
def thetas_above_100000_are_cut(oracle: Oracle) -> Oracle:
    """A base of the rotation above 1e5 is reduced to 1e5."""
    return with_rope(oracle, lambda rope: replace(rope, theta=min(rope.theta, 1e5)))


@kernel_fault(FaultClass.ROPE, *TURNED)
def betas_of_yarn_are_32_and_1(oracle: Oracle) -> Oracle:
    """YaRN's ramp always uses beta_fast 32 and beta_slow 1."""
    return with_yarn(oracle, lambda yarn: replace(yarn, beta_fast=32.0, beta_slow=1.0))


@kernel_fault(FaultClass.ROPE, *TURNED)
def an_mscale_all_dim_of_0_is_taken_for_unset(oracle: Oracle) -> Oracle:
    """An mscale_all_dim of 0 is replaced by mscale."""
    return with_yarn(
        oracle, lambda yarn: replace(yarn, mscale_all_dim=yarn.mscale_all_dim or yarn.mscale)
    )


@kernel_fault(FaultClass.ROPE, *TURNED, through=rotating)
def yarn_begins_past_its_original_context(x: Array, positions: Positions, rope: Rope) -> Array:
    """Positions below original_max_position are rotated with frequencies without YaRN."""
    turned = rotate(x, positions, rope)
    if rope.yarn is not None:
        near = positions < rope.yarn.original_max_position
        plain = rotate(x[near], positions[near], replace(rope, yarn=None))
        turned[near] = magnitude(rope) * plain
    return turned


def _with_ramp(oracle: Oracle, ends: Callable[[float, Yarn, int], Ends]) -> Oracle:
    """Return an oracle in which YaRN's ramp begins and ends at other pairs."""

    def rotation(x: Array, positions: Positions, rope: Rope) -> Array:
        if rope.yarn is None:
            return rotate(x, positions, rope)
        pairs = x.shape[-1] // 2
        low, high = ends(rope.theta, rope.yarn, 2 * pairs)
        slowed = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)  # [P/2]
        base = frequencies(replace(rope, yarn=None), 2 * pairs)
        angles = positions[:, None] * (base * (1 - slowed) + base / rope.yarn.factor * slowed)
        return magnitude(rope) * turn(x, angles, rope.pairing)

    return rotating(oracle, rotation)


def _ends(theta: float, yarn: Yarn, dim: int) -> Ends:
    """Return the pairs at which YaRN's ramp begins and ends, not rounded."""
    fast, slow = (
        dim * math.log(yarn.original_max_position / (beta * 2 * math.pi)) / (2 * math.log(theta))
        for beta in (yarn.beta_fast, yarn.beta_slow)
    )
    return fast, slow


@kernel_fault(FaultClass.ROPE, *TURNED, through=_with_ramp)
def the_yarn_ramp_takes_theta_for_10000(_: float, yarn: Yarn, dim: int) -> Ends:
    """YaRN's ramp is computed from a base of 10000 instead of theta."""
    low, high = _ends(1e4, yarn, dim)
    return max(math.floor(low), 0), min(math.ceil(high), dim - 1)


@kernel_fault(FaultClass.ROPE, *TURNED, through=_with_ramp)
def the_yarn_ramp_ends_at_the_last_pair(theta: float, yarn: Yarn, dim: int) -> Ends:
    """The end of YaRN's ramp is limited by the number of pairs, not of elements."""
    low, high = _ends(theta, yarn, dim)
    return max(math.floor(low), 0), min(math.ceil(high), dim // 2 - 1)


@kernel_fault(FaultClass.ROPE, *TURNED, through=_with_ramp)
def the_yarn_ramp_is_not_rounded(theta: float, yarn: Yarn, dim: int) -> Ends:
    """The ends of YaRN's ramp are not rounded to whole pairs."""
    low, high = _ends(theta, yarn, dim)
    return max(low, 0.0), min(high, dim - 1.0)
