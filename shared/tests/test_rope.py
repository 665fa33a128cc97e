"""Every parameter of a rotation has a legal range (S-12)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing, Yarn
from paged_mla_shared.rope import LARGEST, SMALLEST, legal_rope

NAN, INF = float("nan"), float("inf")
REALS = ("theta", "yarn.factor", "yarn.beta_fast", "yarn.beta_slow")
MULTIPLIERS = ("yarn.mscale", "yarn.mscale_all_dim")
LENGTH = "yarn.original_max_position"
NO_NUMBERS: tuple[Any, ...] = (None, "40", True, 1j)
BELOW = (NAN, -INF, -1.0, -0.0, 0.0, 5e-324, 1e-320, np.nextafter(SMALLEST, 0.0))
ABOVE = (INF, 1e308, np.nextafter(LARGEST, INF))
NO_MULTIPLIERS = (*NO_NUMBERS, NAN, -1.0, 5e-324, *ABOVE)


def rope_of(name: str, value: Any) -> Rope:
    """Return a rotation with one parameter set; all others have their usual values."""
    first, _, of_yarn = name.partition(".")
    yarn = {"factor": 40.0, "original_max_position": 4096} | ({of_yarn: value} if of_yarn else {})
    more = {} if of_yarn else {first: value}
    return Rope(RopePairing.NEOX, yarn=Yarn(**yarn), **more)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in REALS for value in (*NO_NUMBERS, *BELOW, *ABOVE)),
        *((name, value) for name in MULTIPLIERS for value in NO_MULTIPLIERS),
        *((LENGTH, value) for value in (*NO_NUMBERS, 0, -1, 2**53 + 1, 4096.0, NAN)),
        ("theta", 1.0),
        *((name, np.nextafter(1.0, 0.0)) for name in ("theta", "yarn.factor")),
    ],
)
def test_a_parameter_outside_its_range_is_named(name: str, value: Any):
    with pytest.raises(InvalidArgument) as refused:
        legal_rope(rope_of(name, value))
    assert refused.value.argument == f"rope.{name}"
    assert str(value) in str(refused.value)


@pytest.mark.parametrize("rope", ["neox", {"theta": 1e4}, 5])
def test_a_rotation_is_a_rope(rope: Any):
    with pytest.raises(InvalidArgument, match=r"rope: got .*; allowed: a Rope"):
        legal_rope(rope)


@pytest.mark.parametrize("pairing", ["gptj", None, [], 2])
def test_a_pairing_is_named(pairing: Any):
    with pytest.raises(InvalidArgument, match=r"rope\.pairing"):
        legal_rope(Rope(pairing))


def test_yarn_is_a_yarn():
    with pytest.raises(InvalidArgument, match=r"rope\.yarn: got .*factor"):
        legal_rope(Rope(RopePairing.NEOX, yarn={"factor": 40.0}))  # type: ignore[arg-type]


def test_the_ramp_of_yarn_does_not_run_backwards():
    """Otherwise it would slow the fast pairs instead of the slow pairs."""
    with pytest.raises(InvalidArgument, match=r"beta_fast: got 1\.0; allowed: at least beta_slow"):
        legal_rope(Rope(RopePairing.NEOX, yarn=Yarn(40.0, 4096, beta_fast=1.0, beta_slow=32.0)))


@pytest.mark.parametrize("number", [40, np.float32(40), np.float64(40), np.int64(40), Fraction(40)])
def test_any_real_number_is_a_factor(number: Any):
    """It becomes a Python float, so that no table is computed in float32."""
    yarn = legal_rope(rope_of("yarn.factor", number)).yarn
    assert yarn is not None
    assert type(yarn.factor) is float
    assert yarn == Yarn(40.0, 4096)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, LARGEST) for name in (*REALS[:3], *MULTIPLIERS)),
        *((name, value) for name in MULTIPLIERS for value in (0, SMALLEST)),
        *(("theta", 1.0 + 2**-52), ("yarn.factor", 1), ("yarn.beta_slow", SMALLEST)),
        *((LENGTH, value) for value in (1, 2**53, np.int64(64))),
    ],
)
def test_ranges_hold_their_ends(name: str, value: Any):
    legal_rope(rope_of(name, value))


def test_a_theta_of_1_is_legal_without_yarn():
    assert legal_rope(Rope(RopePairing.NEOX, 1)).theta == 1.0


def test_a_pairing_may_be_a_word():
    """S-12: a string becomes the member of the enumeration."""
    for pairing in RopePairing:
        assert legal_rope(Rope(str(pairing))).pairing is pairing  # type: ignore[arg-type]
