from dataclasses import replace

import pytest
import torch
from mla_step import R, assert_close, build, dense

from paged_mla_optimized import PagedMla

ROWS = {
    "decode": ((1, 1), (16, 1), (33, 1), (70, 1)),
    "prompt": ((40, 40),),
    "chunk": ((70, 9), (17, 16)),
    "mixed": ((65, 1), (20, 20), (90, 5), (1, 1)),
    "whole-tiles": ((48, 48), (64, 16)),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_matches_dense_attention(rows):
    """S-4, S-5, S-7: bottom-right causal attention with a natural-log lse."""
    step = build(*rows)
    assert_close(step.attend(), dense(step))


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64, 100])
def test_any_block_size(block_size):
    """S-1: blocks shorter, longer and no multiple of a key tile."""
    step = build((70, 3), (33, 1), block_size=block_size)
    assert_close(step.attend(), dense(step))


@pytest.mark.parametrize("num_heads", [1, 3, 16, 24, 65, 128])
def test_any_head_count(num_heads):
    """S-5: heads that straddle query tiles, and tokens that fill several."""
    step = build((40, 3), (50, 1), num_heads=num_heads)
    assert_close(step.attend(), dense(step))


def test_non_causal_sees_the_whole_row():
    """S-4: without a causal mask every query sees every key of its row."""
    step = build((37, 5), (64, 2), mask="non_causal")
    visible = [torch.ones(query_len, seq_len, dtype=bool) for seq_len, query_len in step.rows]
    assert_close(step.attend(), dense(step, visible))


def test_equal_keys_give_their_mean():
    """S-5, S-7: n equal scores weigh 1/n each, and lse is the score plus ln n."""
    step = build((50, 1))
    step.q_nope.zero_()
    step.q_pe.zero_()
    out, lse = step.attend()
    expected = step.keys[0][:, :R].mean(0).expand(1, 4, R)
    assert_close((out, lse), (expected, torch.full((1, 4), 50.0).log()))


def test_dominant_key_is_selected():
    """S-5: a score far above the others returns that key's latent, bit for bit."""
    step = build((50, 1), softmax_scale=1e4)
    step.q_nope[:] = step.keys[0][23, :R]
    step.q_pe.zero_()
    scores = step.keys[0][:, :R] @ step.keys[0][23, :R]
    winner = int(scores.argmax())
    out, _ = step.attend()
    assert torch.equal(out[0, 0], step.keys[0][winner, :R])


def test_later_tokens_are_not_seen():
    """S-4: a changed last token leaves the bits of all earlier queries alone."""
    step = build((48, 48))
    before, _ = step.attend()
    block = step.block_table[0, 47 // 16]
    step.cache[block, 47 % 16] += 1.0
    after, _ = step.attend()
    assert torch.equal(before[:47], after[:47])
    assert not torch.equal(before[47], after[47])


def test_strided_queries_and_cache():
    """S-9: gaps between heads, tokens and blocks hold NaN and are never used."""
    step = build((40, 3), (20, 1))
    dense_answer = step.attend()
    for name in ("q_nope", "q_pe"):
        tensor = getattr(step, name)
        tokens, heads, width = tensor.shape
        wide = torch.full((2 * tokens, heads + 1, width + 16), torch.nan)
        view = wide[::2, :heads, :width]
        view.copy_(tensor)
        setattr(step, name, view)
    pool = torch.full((len(step.cache), 20, 64), torch.nan)
    pool[:, :16, :48] = step.cache
    step.cache = pool[:, :16, :48]
    table = torch.full((2, 9), 2**31 - 1, dtype=torch.int32)
    table[:, :8:2] = step.block_table
    step.block_table = table[:, :8:2]
    assert torch.equal(step.attend()[0], dense_answer[0])


def test_given_outputs_are_written():
    """S-6: out= and lse= receive the output, with their own strides."""
    step = build((40, 2), (0, 1))
    mla = PagedMla(step.config, "cpu")
    expected_out, expected_lse = step.attend(mla)
    out = torch.full((3, 4, 2 * R), torch.nan)[..., :R]
    lse = torch.full((4, 3), torch.nan).T
    returned = mla.attend(step.q_nope, step.q_pe, step.cache, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)


def test_answers_are_new_tensors():
    """S-9: where none are given, the next call does not overwrite them; they are dense."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    expected = [tensor.clone() for tensor in step.attend(mla)]
    strided = torch.cat([step.q_nope, step.q_pe], dim=-1)[..., :R]
    answer = mla.attend(strided, step.q_pe, step.cache)
    mla.attend(-step.q_nope, step.q_pe, step.cache)
    for mine, theirs in zip(answer, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous()


def test_float16():
    """S-5: half precision in and out, float32 lse."""
    step = build((40, 3), dtype=torch.float16, cache_format="fp16")
    step.q_nope, step.q_pe = step.q_nope.half(), step.q_pe.half()
    step.keys = [keys.half().float() for keys in step.keys]
    out, lse = step.attend()
    expected_out, expected_lse = dense(step)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


def test_no_other_row_notices_a_key_that_is_no_number():
    """S-4: those that see it get no numbers; the queries before it in its row may or may not."""
    step = build((70, 3), (33, 2))
    before, _ = step.attend()
    block, inside = divmod(69, step.config.block_size)
    step.cache[step.block_table[0, block], inside, 0] = torch.nan
    after, _ = step.attend()
    assert after[2].isnan().all()
    assert torch.equal(after[3:], before[3:])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seq_len", [1, 17, 257])
def test_a_part_whose_only_key_is_no_number_is_not_empty(seq_len, batch_invariant):
    """S-5: key 256 is alone in its part; the outputs of other parts do not hide its output."""
    lens = {"max_model_len": 512, "batch_invariant": batch_invariant}
    step = build((seq_len, 1), (40, 1), num_heads=2, **lens)
    block, inside = divmod(seq_len - 1, step.config.block_size)
    step.cache[step.block_table[0, block], inside] = torch.nan
    out, lse = step.attend()
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert lse[1].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # 0 times infinity
@pytest.mark.parametrize("column", [3, R + 3])
def test_a_key_of_score_minus_infinity_weighs_nothing(column):
    """S-5: only outputs with an infinite latent element are NaN; the lse ignores the key."""
    step = build((70, 1), (33, 2))
    queries = step.q_nope if column < R else step.q_pe
    queries[0, :, 3] = -queries[0, :, 3].abs()
    without = replace(step, rows=((69, 1), (33, 2)), keys=[step.keys[0][:-1], step.keys[1]])
    expected_out, expected_lse = dense(without)
    if column < R:
        expected_out[0, :, column] = torch.nan
    block, inside = divmod(69, step.config.block_size)
    step.cache[step.block_table[0, block], inside, column] = torch.inf
    out, lse = step.attend()
    expected = expected_out.float(), expected_lse.float()
    torch.testing.assert_close((out, lse), expected, rtol=2e-5, atol=2e-5, equal_nan=True)
