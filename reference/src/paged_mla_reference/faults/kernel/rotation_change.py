"""Changes of a rotation from which faults are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.kernel.change import appending, with_batch, with_problem
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem, Rope, RopePairing, Yarn

Array = NDArray[np.float64]
Positions = NDArray[np.int64]  # [T]
Distances = Callable[[Problem, Batch], Positions]
Rotation = Callable[[Array, Positions, Rope], Array]  # as rotate
Result = TypeVar("Result")
Call = Callable[[Problem, Batch, CacheImage], Result]  # of an oracle


def _turned(x: NDArray[Any], by: Positions, rope: Rope) -> NDArray[Any]:
    """Rotate `x` by the positions `by`, without YaRN's magnitude."""
    yarn = rope.yarn and replace(rope.yarn, mscale=rope.yarn.mscale_all_dim)
    return rotate(widen(x), by, replace(rope, yarn=yarn)).astype(x.dtype)


def _further(field: str, by: Distances) -> Callable[[Problem, Batch], Batch]:
    """Return a change of a batch that rotates its `field` by additional positions."""

    def turned(problem: Problem, batch: Batch) -> Batch:
        if problem.rope is None:
            return batch
        x = _turned(getattr(batch, field), by(problem, batch), problem.rope)
        return replace(batch, **{field: x})

    return turned


def rotating_further(oracle: Oracle, by: Distances) -> Oracle:
    """Return an oracle that rotates queries by additional positions."""
    return with_batch(oracle, _further("q_pe", by))


def storing_further(oracle: Oracle, by: Distances) -> Oracle:
    """Return an oracle that rotates keys by additional positions when they are stored."""
    return appending(oracle, _further("k_pe", by))


def placed(oracle: Oracle, place: Callable[[Batch, Positions], Positions]) -> Oracle:
    """Return an oracle that rotates queries and keys by other positions."""

    def by(problem: Problem, batch: Batch) -> Positions:
        positions = RIGHT.metadata(problem, batch).positions
        return place(batch, positions) - positions

    return storing_further(rotating_further(oracle, by), by)


def with_rope(oracle: Oracle, change: Callable[[Rope], Rope]) -> Oracle:
    """Return an oracle that rotates queries and keys with another rope."""

    def other(problem: Problem) -> Problem:
        return problem if problem.rope is None else replace(problem, rope=change(problem.rope))

    both = with_problem(oracle, other)
    return replace(both, append=lambda p, b, image: oracle.append(other(p), b, image))


def with_yarn(oracle: Oracle, change: Callable[[Yarn], Yarn]) -> Oracle:
    """Return an oracle that rotates queries and keys with another YaRN, if the rope has one."""
    return with_rope(
        oracle, lambda rope: replace(rope, yarn=None if rope.yarn is None else change(rope.yarn))
    )


def _rotated(call: Call[Result], field: str, rotation: Rotation) -> Call[Result]:
    """Return the call with `field` rotated by another function."""

    def rotated(problem: Problem, batch: Batch, image: CacheImage) -> Result:
        if problem.rope is None:
            return call(problem, batch, image)
        positions = RIGHT.metadata(problem, batch).positions
        x = rotation(widen(getattr(batch, field)), positions, problem.rope)
        turned = replace(batch, **{field: round_to(x, problem.dtype)})
        return call(replace(problem, rope=None), turned, image)

    return rotated


def rotating_queries(oracle: Oracle, rotation: Rotation) -> Oracle:
    """Return an oracle that rotates queries by another function."""
    return replace(oracle, attend=_rotated(oracle.attend, "q_pe", rotation))


def rotating_keys(oracle: Oracle, rotation: Rotation) -> Oracle:
    """Return an oracle that rotates keys by another function when they are stored."""
    return replace(oracle, append=_rotated(oracle.append, "k_pe", rotation))


def rotating(oracle: Oracle, rotation: Rotation) -> Oracle:
    """Return an oracle that rotates queries and keys by another function."""
    return rotating_keys(rotating_queries(oracle, rotation), rotation)


def turn(x: Array, angles: Array, pairing: RopePairing) -> Array:
    """Rotate the pairs of `x`, [T, .., P], by angles, [T, P / 2]."""
    half = x.shape[-1] // 2
    interleaved = pairing is RopePairing.INTERLEAVED
    first = np.s_[..., 0::2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., half:]
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), half)
    turned = (x[first] + 1j * x[second]) * np.exp(1j * angles)
    out = np.empty_like(x)
    out[first], out[second] = turned.real, turned.imag
    return out
