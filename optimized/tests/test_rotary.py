import math

import pytest
import torch

from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing, Yarn
from paged_mla_shared.rope import LARGEST, SMALLEST


def angles(rope, dim=64, positions=2):
    cos, sin = rope_tables(rope, dim, positions, torch.float32)
    return torch.atan2(sin, cos)


def test_plain_frequencies():
    """S-12: pair i turns by theta ** (-2i / P) radians per position."""
    turned = angles(Rope(RopePairing.NEOX))[1]
    expected = [10000.0 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64))


def test_far_positions_keep_their_angle():
    """S-12: position 131071 is as exact as position 1."""
    cos, _ = rope_tables(Rope(RopePairing.NEOX), 64, 131072, torch.bfloat16)
    angle = 131071 * 10000.0 ** (-2 / 64)
    assert float(cos[131071, 1]) == pytest.approx(math.cos(angle), abs=1e-6)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    """S-12: DeepSeek's settings (factor 40 over 4096) blend between pairs 10 and 23."""
    plain = angles(Rope(RopePairing.NEOX))[1]
    turned = angles(Rope(RopePairing.NEOX, yarn=Yarn(40.0, 4096)))[1]
    torch.testing.assert_close(turned[:11], plain[:11])
    torch.testing.assert_close(turned[23:], plain[23:] / 40)
    assert (turned[11:23] < plain[11:23]).all()
    assert (turned[11:23] > plain[11:23] / 40).all()


def test_yarn_multiplier_is_the_ratio_of_two_mscales():
    """S-12: equal mscales leave lengths alone; mscale 1 over 0.707 does not."""
    cos, sin = rope_tables(
        Rope(RopePairing.NEOX, yarn=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.707)),
        64,
        3,
        torch.float32,
    )
    expected = (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1)
    torch.testing.assert_close(
        torch.hypot(cos, sin), torch.full((3, 32), expected, dtype=torch.float64)
    )


EDGES = [
    *(
        Rope(RopePairing.NEOX, theta, Yarn(factor, original, fast, slow, mscale, mscale_all_dim))
        for theta in (1 + 2**-52, LARGEST)
        for original in (1, 2**53)
        for factor in (1.0, LARGEST)
        for fast, slow in ((SMALLEST, SMALLEST), (LARGEST, SMALLEST), (LARGEST, LARGEST))
        for mscale, mscale_all_dim in ((0.0, LARGEST), (LARGEST, 0.0))
    ),
    *(Rope(RopePairing.NEOX, theta) for theta in (1.0, LARGEST)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_legal_rope_makes_tables(dtype):
    """S-12: at the ends of all ranges nothing is NaN or infinite, and no magnitude vanishes."""
    for rope in EDGES:
        cos, sin = rope_tables(rope, 64, 3, dtype)
        assert (cos[0] > torch.finfo(cos.dtype).tiny).all()
        assert (sin[0] == 0).all()
        assert (torch.hypot(cos, sin) / cos[0] - 1).abs().max() < 1e-6
        turned = torch.atan2(sin[1], cos[1])
        assert ((turned >= 0) & (turned <= 1.000001)).all()


@pytest.mark.parametrize(
    "yarn",
    [
        {"beta_slow": 1e-320},
        {"beta_fast": 1e308},
        {"factor": 1e-320},
        {"factor": 1e308, "mscale": 1e308},
    ],
)
def test_what_makes_no_tables_is_refused(yarn):
    """S-12: an error names the parameter, its value and its range."""
    given = {"factor": 40.0, "original_max_position": 64} | yarn
    [name, value] = next(iter(yarn.items()))
    with pytest.raises(InvalidArgument, match=rf"rope\.yarn\.{name}: got .* 2 \*\* 100") as refused:
        rope_tables(Rope(RopePairing.NEOX, yarn=Yarn(**given)), 64, 2, torch.float32)
    assert str(value) in str(refused.value)
