import numpy as np
import pytest
import torch
from mla_step import R, assert_close
from triton.runtime.interpreter import InterpreterBuilder

from paged_mla_optimized import merge_partials
from paged_mla_optimized.kernels.common.merge import merge_kernel
from paged_mla_optimized.operations.merge.partials import merge_spec
from paged_mla_shared.errors import InvalidArgument


def partials(n, tokens=3, heads=5, width=R):
    generator = torch.Generator().manual_seed(n)
    outs = torch.randn(n, tokens, heads, width, generator=generator)
    return outs, 3 * torch.randn(n, tokens, heads, generator=generator)


def merged(outs, lses):
    weights = lses.double().softmax(0)
    return (weights[..., None] * outs.double()).sum(0), lses.double().logsumexp(0)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("width", [1, 32, 100, 512])
def test_weights_are_the_exponentials_of_lse(n, width):
    """S-8: any number of partials, of any width."""
    outs, lses = partials(n, width=width)
    assert_close(merge_partials(outs, lses), merged(outs, lses))


def test_empty_partials_weigh_nothing():
    """S-8: -inf weighs exactly 0 even where the output is NaN or inf."""
    outs, lses = partials(4)
    expected = merge_partials(outs[[0, 2]], lses[[0, 2]])
    lses[[1, 3]] = -torch.inf
    outs[1], outs[3] = torch.nan, torch.inf
    for actual, wanted in zip(merge_partials(outs, lses), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_all_empty():
    """S-8: nothing and nothing is (0, -inf)."""
    out, lse = merge_partials(
        torch.full((2, 1, 2, R), torch.nan), torch.full((2, 1, 2), -torch.inf)
    )
    assert torch.equal(out, torch.zeros(1, 2, R))
    assert torch.isneginf(lse).all()


def test_no_number_is_not_nothing(monkeypatch):
    """S-8: it hides in no maximum of a GPU, which leaves NaN out as NumPy's fmax does."""
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_maxnumf",
        lambda builder, x, y: builder.binary_op(x, y, np.fmax),
    )
    outs, lses = partials(2)
    lses[:, 0], lses[1, 1], lses[:, 2, 0] = torch.nan, torch.nan, -torch.inf
    out, lse = merge_partials(outs, lses)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert (lse[2, 0], lse[2, 1].isfinite()) == (-torch.inf, True)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_scores(shift):
    """S-8: weights depend on differences of lse alone."""
    outs, lses = partials(3)
    out, lse = merge_partials(outs, lses + shift)
    expected_out, expected_lse = merged(outs, (lses + shift).float())
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)


def test_strided_partials():
    """S-8: views are copied, not misread."""
    outs, lses = partials(4)
    for actual, wanted in zip(
        merge_partials(outs[::2], lses[::2]),
        merge_partials(outs[::2].clone(), lses[::2].clone()),
        strict=True,
    ):
        assert torch.equal(actual, wanted)


def test_nothing_behind_the_last_pair_is_written():
    """S-8: widths below a power of two end where they end."""
    outs, lses = partials(2, tokens=1, heads=2, width=100)
    out, lse = torch.full((201,), 7.0), torch.full((3,), 7.0)
    merge_kernel[(1,)](outs, lses, out, lse, 2, 2, 100, **merge_spec(100).launched)
    assert_close((out[:200].view(1, 2, 100), lse[:2].view(1, 2)), merged(outs, lses))
    assert out[200] == lse[2] == 7


def test_no_queries():
    """S-8: no token gives empty tensors."""
    out, lse = merge_partials(torch.empty(2, 0, 4, R), torch.empty(2, 0, 4))
    assert out.shape == (0, 4, R)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("argument", "outs", "lses"),
    [
        ("outs", torch.empty(0, 1, 2, R), torch.empty(0, 1, 2)),
        ("outs", torch.empty(2, 1, 2, 0), torch.empty(2, 1, 2)),
        ("outs", torch.empty(2, 1, 2, R).half(), torch.empty(2, 1, 2)),
        ("outs", torch.empty(2, 2, R), torch.empty(2, 1, 2)),
        ("lses", torch.empty(2, 1, 2, R), torch.empty(2, 2, 1)),
        ("lses", torch.empty(2, 1, 2, R), torch.empty(2, 1, 2).double()),
        ("outs", torch.empty(1, 1, 1, 2**18 + 1), torch.empty(1, 1, 1)),
        ("outs", torch._neg_view(torch.empty(2, 1, 2, R)), torch.empty(2, 1, 2)),
        ("lses", torch.empty(2, 1, 2, R), torch._neg_view(torch.empty(2, 1, 2))),
    ],
    ids=[
        *("none", "no-latents", "half", "3d", "transposed-lse", "double-lse", "wide"),
        *("negative-view", "negative-view-lse"),
    ],
)
def test_refuses_what_cannot_be_merged(argument, outs, lses):
    """S-8: the error names the argument."""
    with pytest.raises(InvalidArgument) as error:
        merge_partials(outs, lses)
    assert error.value.argument == argument
