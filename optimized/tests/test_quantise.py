"""Queries are quantised once a step, before a kernel of FP8 products reads them."""

import pytest
import torch
from fp8_step import codes, scale_of, values
from mla_step import P, R, config

from paged_mla_optimized.launchers.quantise import QuantiseQueries


def quantiser(**changes):
    """Return the launcher of a config, whose buffers hold what nobody wrote."""
    quantise = QuantiseQueries(config(**changes), "interpreter", torch.device("cpu"))
    quantise.codes.fill_(0xA5)
    quantise.scales.fill_(7.0)
    return quantise


def queries(tokens, num_heads, dtype=torch.float32):
    """Return q_nope and q_pe of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, num_heads, R + P, generator=generator)
    q *= 10.0 ** torch.randint(-3, 4, (tokens, num_heads, 1), generator=generator)
    return q[..., :R].to(dtype), q[..., R:].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_every_pair_has_a_scale(num_heads, dtype):
    """S-11: its largest magnitude, of q_nope or q_pe, is the largest code; others are rounded."""
    q_nope, q_pe = queries(7, num_heads, dtype)
    quantise = quantiser(num_heads=num_heads)
    found, scales = quantise.launch(q_nope, q_pe)
    q = torch.cat([q_nope, q_pe], -1).float()
    torch.testing.assert_close(scales[:7], scale_of(q), rtol=1e-6, atol=0.0)
    assert torch.equal(found[:7], codes(q / scales[:7, :, None]))
    assert ((found[:7] & 0x7F).amax(-1) == 0x7E).all()
    assert (found[7:] == 0xA5).all()
    assert (scales[7:] == 7.0).all()


def test_queries_of_zeros():
    """S-5: their scale is a number, and what it is multiplied by is 0."""
    found, scales = quantiser().launch(torch.zeros(2, 4, R), torch.zeros(2, 4, P))
    assert not values(found[:2]).any()
    assert (scales[:2] > 0).all()
    assert scales[:2].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [3, R + 5])
def test_what_is_no_number_stays_none(bad, column):
    """S-5: it is not the largest number, and the other codes of its query are as they were."""
    q = torch.cat(queries(2, 4), -1)
    q[..., column] = 0.0
    clean, clean_scales = (t.clone() for t in quantiser().launch(q[..., :R], q[..., R:]))
    q[1, 2, column] = bad
    found, scales = quantiser().launch(q[..., :R], q[..., R:])
    assert found[1, 2, column] & 0x7F == 0x7F
    found[1, 2, column] = clean[1, 2, column]
    assert torch.equal(found, clean)
    assert torch.equal(scales, clean_scales)


def test_strided_queries():
    """S-9: gaps between heads and tokens hold NaN and are never used."""
    q_nope, q_pe = queries(5, 4)
    expected = quantiser().launch(q_nope, q_pe)
    wide = torch.full((10, 6, R + P + 16), torch.nan)
    views = wide[::2, :4, :R], wide[::2, :4, R : R + P]
    for view, q in zip(views, (q_nope, q_pe), strict=True):
        view.copy_(q)
    for mine, theirs in zip(quantiser().launch(*views), expected, strict=True):
        assert torch.equal(mine, theirs)
