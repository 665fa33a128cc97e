"""Rotations and YaRN, by hand and by their properties."""

from __future__ import annotations

from math import cos, log, pi, sin

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_mla_reference.rules.rope import (
    frequencies,
    magnitude,
    mscale,
    rotate,
    yarn_softmax_scale,
)
from paged_mla_shared.dims import DEEPSEEK_V3
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing, Yarn
from paged_mla_shared.rope import LARGEST, SMALLEST

X = np.array([[1.0, 2.0, 3.0, 4.0]])
DEEPSEEK_YARN = Yarn(factor=40.0, original_max_position=4096)


def test_interleaved_pairs_neighbours():
    """S-12: elements (0, 1) turn by 3 radians, (2, 3) by 0.03."""
    found = rotate(X, np.array([3]), Rope(RopePairing.INTERLEAVED))[0]
    a, b = 3.0, 0.03
    expected = [cos(a) - 2 * sin(a), 2 * cos(a) + sin(a)]
    expected += [3 * cos(b) - 4 * sin(b), 4 * cos(b) + 3 * sin(b)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_neox_pairs_halves():
    """S-12: elements (0, 2) turn by 3 radians, (1, 3) by 0.03."""
    found = rotate(X, np.array([3]), Rope(RopePairing.NEOX))[0]
    a, b = 3.0, 0.03
    expected = [cos(a) - 3 * sin(a), 2 * cos(b) - 4 * sin(b)]
    expected += [3 * cos(a) + sin(a), 4 * cos(b) + 2 * sin(b)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("pairing", RopePairing)
def test_position_zero_turns_nothing(pairing):
    """S-12: positions are absolute and start at 0."""
    assert rotate(X, np.array([0]), Rope(pairing)).tolist() == X.tolist()


@pytest.mark.parametrize("pairing", RopePairing)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(first=st.integers(0, 500), second=st.integers(0, 500), shift=st.integers(0, 500))
def test_scores_depend_on_distance_alone(pairing, first, second, shift):
    """S-12: turning query and key further by the same positions keeps their product."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 8))
    rope = Rope(pairing)

    def product(a, b):
        return float(np.sum(rotate(q, np.array([a]), rope) * rotate(k, np.array([b]), rope)))

    assert product(first, second) == pytest.approx(product(first + shift, second + shift))


def test_heads_of_a_token_turn_alike():
    """S-12: every head of token t is rotated at the position of t."""
    q = np.random.default_rng(1).standard_normal((2, 3, 4))
    together = rotate(q, np.array([5, 9]), Rope(RopePairing.NEOX))
    for head in range(3):
        alone = rotate(q[:, head], np.array([5, 9]), Rope(RopePairing.NEOX))
        assert together[:, head].tolist() == alone.tolist()


def test_yarn_of_deepseek_v3():
    """S-12: of 32 pairs 0..10 keep their frequency, 23..31 are slowed by 40, a ramp between."""
    plain = frequencies(Rope(RopePairing.INTERLEAVED), 64)
    slowed = frequencies(Rope(RopePairing.INTERLEAVED, yarn=DEEPSEEK_YARN), 64)
    ratio = slowed / plain
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-12)
    np.testing.assert_allclose(ratio[15], 1 - 5 / 13 + 5 / 13 / 40, rtol=1e-12)


def test_yarn_magnitude():
    """S-12: cos and sin carry mscale / mscale_all_dim, which is 1 for DeepSeek-V3."""
    v3 = Rope(RopePairing.INTERLEAVED, yarn=DEEPSEEK_YARN)
    assert magnitude(v3) == 1.0
    uneven = Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.0)
    expected = (0.0707 * log(40) + 1) / (0.1 * log(40) + 1)
    rope = Rope(RopePairing.NEOX, yarn=uneven)
    assert magnitude(rope) == pytest.approx(expected)
    turned = rotate(X, np.array([0]), rope)
    np.testing.assert_allclose(turned, X * expected, rtol=1e-12)


def test_softmax_scale_of_deepseek_v3():
    """S-5: 192^-0.5 without yarn, times (0.1 ln 40 + 1)^2 with it; never 576^-0.5."""
    assert yarn_softmax_scale(DEEPSEEK_V3) == pytest.approx(0.07216878364870322)
    with_yarn = yarn_softmax_scale(DEEPSEEK_V3, Rope(RopePairing.INTERLEAVED, yarn=DEEPSEEK_YARN))
    assert with_yarn == pytest.approx(0.1352337788608801)


def test_yarn_that_extends_nothing_changes_no_scale():
    """S-5: a factor of 1 or less has temperature 1."""
    rope = Rope(RopePairing.NEOX, yarn=Yarn(1.0, 4096))
    assert yarn_softmax_scale(DEEPSEEK_V3, rope) == yarn_softmax_scale(DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("factor", "expected"), [(0.5, 1.0), (1.0, 1.0), (1.5, 0.2 * log(1.5) + 1)], ids=str
)
def test_mscale(factor, expected):
    """S-5: the temperature grows with the logarithm of the factor, from a factor of 1 on."""
    assert mscale(factor, 2.0) == pytest.approx(expected)


def _slowed(yarn, dim):
    """Return how far each pair is slowed: 0 keeps its frequency, 1 divides it by the factor."""
    plain = frequencies(Rope(RopePairing.NEOX), dim)
    ratio = frequencies(Rope(RopePairing.NEOX, yarn=yarn), dim) / plain
    return ((1 - ratio) / (1 - 1 / yarn.factor)).round(9).tolist()


def test_a_short_context_slows_every_pair_but_the_first():
    """S-12: a ramp that would begin before pair 0 begins there."""
    # Pairs turn 32 times at -0.995 and once at 2.02: the ramp runs from 0 to 3.
    assert _slowed(Yarn(40.0, 64), 16) == pytest.approx([0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1])


def test_a_ramp_ends_at_the_last_element():
    """S-12: a ramp that would end past element P - 1 ends there, as in the published code."""
    # Pairs turn a million times at 2.86 and once at 8.86: the ramp runs from 2 to P - 1 = 7.
    slow = Yarn(40.0, 4_500_000_000, beta_fast=1e6)
    assert _slowed(slow, 8) == pytest.approx([0, 0, 0, 1 / 5])


def test_a_ramp_without_length_is_a_step():
    """S-12: where it begins and ends at pair 0, every later pair is slowed in full."""
    beta = 10000.0 ** (1 / 16) / (2 * pi)  # turned so often at pair -0.5
    assert _slowed(Yarn(40.0, 1, beta_fast=beta, beta_slow=beta), 16) == [0, *[1] * 7]


EDGES = [
    Rope(RopePairing.NEOX, theta, Yarn(factor, original, fast, slow, mscale, mscale_all_dim))
    for theta in (1 + 2**-52, LARGEST)
    for original in (1, 2**53)
    for factor in (1.0, LARGEST)
    for fast, slow in ((SMALLEST, SMALLEST), (LARGEST, SMALLEST), (LARGEST, LARGEST))
    for mscale, mscale_all_dim in ((0.0, LARGEST), (LARGEST, 0.0))
]


def test_every_legal_rope_turns():
    """S-12: at the ends of all ranges, frequencies are in 0..1 and lengths are finite."""
    for rope in EDGES:
        turned = frequencies(rope, 64)
        assert ((turned > 0) & (turned <= 1)).all()
        assert 2**-126 < np.float32(magnitude(rope)) < np.inf
        assert 0 < yarn_softmax_scale(DEEPSEEK_V3, rope) < np.inf


@pytest.mark.parametrize(
    "taken",
    [
        lambda rope: frequencies(rope, 64),
        magnitude,
        lambda rope: yarn_softmax_scale(DEEPSEEK_V3, rope),
    ],
)
@pytest.mark.parametrize("name", ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", [float("nan"), 1e308, 1e-320, -1.0])
def test_what_no_yarn_may_hold_is_refused(taken, name, value):
    """S-5, S-12: an error names the parameter, its value and its range."""
    yarn = Yarn(**({"factor": 40.0, "original_max_position": 4096} | {name: value}))
    with pytest.raises(InvalidArgument, match=r"allowed: .* 2 \*\* 100") as refused:
        taken(Rope(RopePairing.NEOX, yarn=yarn))
    assert f"rope.yarn.{name}: got {value};" in str(refused.value)
