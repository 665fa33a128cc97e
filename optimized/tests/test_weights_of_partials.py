"""Partial results of one group, weighted by their lse: the combine kernel by itself."""

import pytest
import torch

from paged_mla_optimized.kernels.common.combine import combine_kernel
from paged_mla_optimized.kernels.common.token_head import Lines, Partials

R = 32
ROOM, PAIRS = 16, 12  # pairs that a group has room for, and that exist


def joined(outs, lses, *, workers=2, shares=1):
    """Join partials [n, ROOM, R] of one token of PAIRS heads, by so many programs."""
    joins = torch.tensor(
        [[0, len(outs), 0, 0, PAIRS, share, shares, ROOM] for share in range(shares)],
        dtype=torch.int32,
    )
    slots = torch.zeros(1, dtype=torch.int64)
    out, lse = torch.full((1, PAIRS, R), torch.nan), torch.full((1, PAIRS), torch.nan)
    combine_kernel[(shares, workers)](
        joins, slots, Partials(outs, lses), Lines(out, *out.stride()[:2]), lse, *lse.stride(),
        shares, 1, PAIRS, R=R, PLACES=1, OVERLAP=False,
    )  # fmt: skip
    return out[0], lse[0]


def partials(count):
    """Return outputs [count, ROOM, R] and lses [count, ROOM], with NaN after the pairs."""
    torch.manual_seed(count)
    outs, lses = torch.randn(count, ROOM, R), 3 * torch.randn(count, ROOM)
    outs[:, PAIRS:] = torch.nan
    lses[:, PAIRS:] = torch.nan
    return outs, lses


@pytest.mark.parametrize("count", [2, 3, 33, 64, 65, 130])
def test_partials_are_weighed_by_their_lse(count):
    """S-8: any number of them, in one pass or several."""
    outs, lses = partials(count)
    out, lse = joined(outs, lses)
    exact = lses[:, :PAIRS].double()
    weights = exact.softmax(0)[:, :, None]
    torch.testing.assert_close(out, (weights * outs[:, :PAIRS]).sum(0).float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, exact.logsumexp(0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [2, 65])
def test_programs_that_join_change_no_bit(count):
    """S-17: how the partials are added depends on their number alone."""
    outs, lses = partials(count)
    for one, other in zip(joined(outs, lses), joined(outs, lses, workers=5, shares=3), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("empty", [0, 1, 69])
def test_an_empty_partial_may_hold_anything(empty):
    """S-7: a partial result with lse -inf has no weight, for any output."""
    outs, lses = partials(70)
    outs[empty] = torch.nan
    lses[empty] = -torch.inf
    kept = [number for number in range(70) if number != empty]
    for one, other in zip(joined(outs, lses), joined(outs[kept], lses[kept]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_but_empty_partials_is_empty():
    """S-7: out 0 and lse -inf, never NaN."""
    outs, lses = partials(3)
    out, lse = joined(torch.full_like(outs, torch.nan), torch.full_like(lses, -torch.inf))
    assert not out.any()
    assert (lse == -torch.inf).all()
