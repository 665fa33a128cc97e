"""The legal range of every parameter of a ``Rope`` (rule S-12), and YaRN's magnitude."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing, Yarn

SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""The range of every real parameter. In it, all quotients and logarithms are finite in float64, and
the magnitudes of cosines and sines are normal float32 numbers. Parameters that must be at least 1
keep every pair at one radian per position or less, so that float64 can resolve distant angles."""


def legal_rope(rope: object) -> Rope:
    """Validate a rope; return it with all parameters converted to Python numbers.

    Parameters
    ----------
    rope : Rope
        ``pairing`` is a ``RopePairing``; ``theta`` is in 1..2^100, and above 1 with yarn. In yarn,
        ``factor`` is in 1..2^100; ``beta_slow`` and ``beta_fast`` are in 2^-100..2^100, and
        ``beta_fast`` is at least ``beta_slow``; ``original_max_position`` is an integer in
        1..2^53; ``mscale`` and ``mscale_all_dim`` are 0, or in 2^-100..2^100.

    Raises
    ------
    InvalidArgument
        A parameter is not in its range. The message names it, for example ``rope.yarn.factor``.
    """
    if not isinstance(rope, Rope):
        raise InvalidArgument("rope", repr(rope), "a Rope, or None")
    if not isinstance(rope.pairing, str) or rope.pairing not in set(RopePairing):
        raise InvalidArgument("rope.pairing", repr(rope.pairing), " or ".join(RopePairing))
    theta = _real("rope.theta", rope.theta, least=1)
    if rope.yarn is not None and theta == 1:
        raise InvalidArgument("rope.theta", theta, "more than 1 with yarn")
    yarn = None if rope.yarn is None else _legal_yarn(rope.yarn)
    return Rope(RopePairing(rope.pairing), theta, yarn)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's magnitude for a context that is `factor` times as long, 1 if `mscale` is 0."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _legal_yarn(yarn: object) -> Yarn:
    if not isinstance(yarn, Yarn):
        raise InvalidArgument("rope.yarn", repr(yarn), "a Yarn, or None")
    reals = {"factor": _real("rope.yarn.factor", yarn.factor, least=1)}
    for name in ("beta_fast", "beta_slow"):
        reals[name] = _real(f"rope.yarn.{name}", getattr(yarn, name))
    for name in ("mscale", "mscale_all_dim"):
        reals[name] = _real(f"rope.yarn.{name}", getattr(yarn, name), or_zero=True)
    if reals["beta_fast"] < reals["beta_slow"]:
        allowed = f"at least beta_slow = {yarn.beta_slow}"
        raise InvalidArgument("rope.yarn.beta_fast", yarn.beta_fast, allowed)
    return Yarn(original_max_position=_length(yarn.original_max_position), **reals)


def _real(name: str, value: Any, *, least: float = SMALLEST, or_zero: bool = False) -> float:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if is_real and (least <= value <= LARGEST or (or_zero and value == 0)):
        return float(value)
    zero, first = "0, or " if or_zero else "", "1" if least == 1 else "2 ** -100"
    raise InvalidArgument(name, repr(value), f"{zero}{first} to 2 ** 100")


def _length(value: Any) -> int:
    try:
        length = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        length = 0
    if not 1 <= length <= 2**53:
        allowed = "an integer from 1 to 2 ** 53"
        raise InvalidArgument("rope.yarn.original_max_position", repr(value), allowed)
    return length
