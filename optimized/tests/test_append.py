import pytest
import torch
from mla_step import P, R, build

from paged_mla_optimized import PagedMla
from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_shared.problem import Rope, RopePairing


def planned(step):
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    return mla


def latents(tokens):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, R, generator=generator), torch.randn(tokens, P, generator=generator)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_writes_the_planned_slots_and_nothing_else():
    """S-1, S-10: rows of padded rows and tokens are not written."""
    step = build((20, 3), (0, 2), (33, 1), padded_tokens=2)
    mla = planned(step)
    ckv, k_pe = latents(8)
    expected = step.cache.clone().view(-1, R + P)
    for token in (0, 1, 2, 5):
        expected[mla.slot_mapping[token]] = torch.cat([ckv[token], k_pe[token]])
    mla.append(ckv, k_pe, step.cache)
    assert same_bits(step.cache.view(-1, R + P), expected)


def test_given_slots():
    """S-10: the engine's own slots replace the plan's; 0 is one of them, -1 writes nothing."""
    step = build((20, 3))
    mla = planned(step)
    ckv, k_pe = latents(3)
    expected = step.cache.clone().view(-1, R + P)
    expected[40] = torch.cat([ckv[0], k_pe[0]])
    expected[0] = torch.cat([ckv[2], k_pe[2]])
    mla.append(ckv, k_pe, step.cache, torch.tensor([40, -1, 0]))
    assert same_bits(step.cache.view(-1, R + P), expected)


def test_strided_latents_and_cache():
    """S-10: gaps in the cache keep their bits, gaps in the latents are not copied."""
    step = build((20, 3))
    mla = planned(step)
    ckv, k_pe = latents(3)
    dense_cache = step.cache.clone()
    mla.append(ckv, k_pe, dense_cache)
    pool = torch.full((len(step.cache), 20, 64), 5.0)
    view = pool[:, :16, :48]
    view.copy_(step.cache)
    wide = torch.full((3, R + P + 8), torch.nan)
    wide[:, :R], wide[:, R : R + P] = ckv, k_pe
    mla.append(wide[:, :R], wide[:, R : R + P], view)
    assert same_bits(view, dense_cache)
    assert (pool[:, 16:] == 5.0).all()
    assert (pool[..., 48:] == 5.0).all()


@pytest.mark.parametrize("pairing", list(RopePairing))
def test_keys_are_rotated_once_at_their_position(pairing):
    """S-12: the cache holds k_pe turned by position * theta ** (-2i / P); ckv is copied."""
    step = build((20, 2), rope=Rope(pairing, theta=100.0))
    mla = planned(step)
    ckv, k_pe = latents(2)
    mla.append(ckv, k_pe, step.cache)
    written = step.cache.view(-1, R + P)[mla.slot_mapping]
    angles = torch.tensor([18.0, 19.0])[:, None] * 100.0 ** (-torch.arange(0, P, 2) / P)
    pairs = k_pe.view(2, P // 2, 2) if pairing == "interleaved" else k_pe.view(2, 2, P // 2).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles))
    turned = turned if pairing == "interleaved" else turned.mT
    assert torch.equal(written[:, :R], ckv)
    torch.testing.assert_close(written[:, R:], turned.reshape(2, P), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pairing", list(RopePairing))
def test_queries_turn_with_their_keys(pairing):
    """S-12: scores of rotated queries and keys depend on the distance alone."""
    lses = []
    for seq_len in (1, 40):
        step = build((seq_len, 1), rope=Rope(pairing), seed=1)
        step.q_nope.zero_()
        mla = planned(step)
        step.cache[:] = 0
        mla.append(torch.zeros(1, R), step.q_pe[:, 0].clone(), step.cache)
        _, lse = mla.attend(step.q_nope, step.q_pe, step.cache)
        score = step.config.softmax_scale * float(step.q_pe[0, 0] @ step.q_pe[0, 0])
        expected = torch.tensor([0.0] * (seq_len - 1) + [score]).logsumexp(0)
        lses.append((float(lse[0, 0]), float(expected)))
    for actual, expected in lses:
        assert actual == pytest.approx(expected, rel=1e-5)


def test_tables_cover_every_position():
    """S-12: one line of angles for each position of the longest row."""
    cos, sin = rope_tables(Rope(RopePairing.NEOX), P, 256, torch.bfloat16)
    assert cos.shape == sin.shape == (256, P // 2)
    assert cos.dtype is torch.float32
