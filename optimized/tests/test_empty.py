import torch
from mla_step import R, assert_close, build, dense

from paged_mla_optimized import PagedMla


def test_padded_rows_and_tokens_have_empty_outputs():
    """S-2, S-6: rows of length 0 and tokens past the last row give (0, -inf), NaN inputs or not."""
    step = build((0, 2), (33, 2), (0, 1), padded_tokens=3)
    step.q_nope[:2] = torch.nan
    out, lse = step.attend()
    padded = [0, 1, 4, 5, 6, 7]
    assert torch.equal(out[padded], torch.zeros(6, 4, R))
    assert torch.equal(lse[padded], torch.full((6, 4), -torch.inf))
    assert_close((out[2:4], lse[2:4]), tuple(answer[2:4] for answer in dense(step)))


def test_rows_without_queries():
    """S-2: rows without queries have no effect."""
    step = build((65, 0), (33, 1), (7, 0), (20, 2))
    assert_close(step.attend(), dense(step))


def test_no_rows_but_padded_tokens():
    """S-6: a step of padding alone is still written."""
    out, lse = build(padded_tokens=4).attend()
    assert torch.equal(out, torch.zeros(4, 4, R))
    assert torch.isneginf(lse).all()


def test_no_tokens():
    """S-2: a step without tokens returns empty tensors and launches nothing."""
    step = build((65, 0))
    out, lse = step.attend()
    assert out.shape == (0, 4, R)
    assert lse.shape == (0, 4)


def test_no_tokens_appends_nothing():
    """S-10: appending no token leaves the cache alone."""
    step = build((65, 0))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    before = step.cache.clone()
    mla.append(torch.empty(0, R), torch.empty(0, 16), step.cache)
    torch.testing.assert_close(step.cache, before, rtol=0, atol=0, equal_nan=True)


def test_table_tails_of_any_kind():
    """S-9: entries past a row's last block are no address."""
    answers = [build((20, 1), (70, 2), (0, 1), tail=tail).attend()[0] for tail in (2**31 - 1, -1)]
    assert torch.equal(*answers)
