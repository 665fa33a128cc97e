from dataclasses import replace

import pytest
import torch
from mla_step import TILES, assert_close, build, dense

from paged_mla_optimized import PagedMla


@pytest.mark.parametrize("queries", [0, 1], ids=["no-queries", "no-keys"])
@pytest.mark.parametrize("seq_len", [200, 320], ids=["few-partials", "many-partials"])
def test_other_rows_do_not_change_the_bits(seq_len, queries):
    """S-17: alone, or in a bucket of 70 rows of which the others are empty."""
    sizes = {"max_rows": 70, "max_query_tokens": 71, "max_model_len": 512}
    alone = build((seq_len, 1), **sizes)
    padded = build((seq_len, 1), *[(0, queries)] * 69, **sizes)
    padded.q_nope[0], padded.q_pe[0] = alone.q_nope[0], alone.q_pe[0]
    padded.cache, padded.block_table[0] = alone.cache, alone.block_table[0]
    first, second = alone.attend(), padded.attend()
    assert_close(first, dense(alone))
    assert torch.equal(first[0], second[0][:1])
    assert torch.equal(first[1], second[1][:1])


@pytest.mark.parametrize("seq_len", [40, 200, 320])
def test_joins_any_number_of_partials(seq_len):
    """S-8, S-20: one, up to eight, or more partial results give the same output."""
    step = build((seq_len, 3), (65, 1), num_heads=6, max_model_len=512)
    mla = PagedMla(step.config, "cpu")
    assert_close(step.attend(mla), dense(step))
    assert_close(step.attend(mla), dense(step))


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_pairs_of_a_row_stay_in_it(heads):
    """S-8: a row merged from two partial results does not change the next row or later memory."""
    step = build((64, 1), (3, 1), num_heads=heads)
    assert_close(step.attend(), dense(step))


@pytest.mark.parametrize("parts", [64, 70, 140])
def test_joins_partials_of_a_hundred_parts(parts):
    """S-8, S-20: up to 64 are loaded at a time, and what is left after them."""
    step = build((16 * parts, 1), num_heads=2, max_model_len=16 * parts)
    mla = PagedMla(step.config, "cpu", variant=replace(TILES, programs_per_sm=parts))
    assert_close(step.attend(mla), dense(step))
    assert mla._core.plan.joins[:, 1].max() == parts


def test_joins_dozens_of_partials():
    """S-8, S-20: 35 splits of one row, more than one program holds at a time."""
    step = build((1100, 1), (40, 1), num_heads=2, max_model_len=1200, batch_invariant=True)
    assert_close(step.attend(), dense(step))
