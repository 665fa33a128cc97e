import math

import pytest
import torch

from paged_mla_optimized.launchers.rotary import rope_tables
from paged_mla_shared.problem import Rope, RopePairing, Yarn


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
