"""Attention over FP8 caches, held against float64 on the values that the caches hold."""

from dataclasses import replace

import pytest
import torch
from fp8_step import LAYER_SCALE, NAMES, build_fp8, slots_of, values_of
from mla_step import R, assert_close, dense

from paged_mla_optimized import LatentCache, PagedMla
from paged_mla_optimized.tensors.step import MlaStep

ROWS = {
    "decode": ((1, 1), (16, 1), (33, 1), (70, 1)),
    "mixed": ((65, 1), (20, 20), (90, 5), (0, 2), (1, 1)),
    "whole-tiles": ((48, 48), (64, 16)),
}

each_format = pytest.mark.parametrize("name", NAMES)


@each_format
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_matches_dense_attention(name, rows):
    """S-5, S-7, S-9: only float32's rounding error, and no effect of memory past a row."""
    step = build_fp8(name, *rows, padded_tokens=1, max_query_tokens=80)
    assert_close(step.attend(), dense(step))


@each_format
@pytest.mark.parametrize("block_size", [4, 12, 32, 64, 100])
def test_any_block_size(name, block_size):
    """S-1, S-11: tiles inside a block, and blocks inside a tile."""
    step = build_fp8(name, (70, 3), (33, 1), block_size=block_size)
    assert_close(step.attend(), dense(step))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fp8_block_group"])
@pytest.mark.parametrize("block_size", [1, 3])
def test_blocks_of_few_tokens(name, block_size):
    """S-1, S-11: where blocks need no four groups."""
    step = build_fp8(name, (70, 3), (33, 1), block_size=block_size)
    assert_close(step.attend(), dense(step))


@each_format
@pytest.mark.parametrize("num_heads", [1, 24, 65])
def test_any_head_count(name, num_heads):
    """S-5: heads that straddle query tiles, and tokens that fill several."""
    step = build_fp8(name, (40, 3), (50, 1), num_heads=num_heads)
    assert_close(step.attend(), dense(step))


@each_format
def test_float16(name):
    """S-5, S-11: queries and outputs in half precision; codes and keys are exact there."""
    step = build_fp8(name, (40, 3), (70, 1), dtype=torch.float16)
    out, lse = step.attend()
    expected_out, expected_lse = dense(step)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@each_format
def test_small_latents_in_float16(name):
    """S-5, S-11: weights times scales that are almost 0 in float16 are as exact as others."""
    step = build_fp8(
        name, (90, 3), (70, 1), dtype=torch.float16, magnitude=2**-10, softmax_scale=0.2 * 2**10
    )
    out, lse = step.attend()
    expected_out, expected_lse = dense(step)
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-3, atol=2e-3 * 2**-10)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fp8_e4m3"])
def test_keys_of_all_magnitudes(name):
    """S-11: each key has its own scale, from 1e-6 to 1e6; the large ones are not the only ones."""
    step = build_fp8(name, (48, 1), magnitude=10 ** torch.linspace(-6, 6, 48), softmax_scale=1e-7)
    out, lse = step.attend()
    expected_out, expected_lse = dense(step)
    torch.testing.assert_close(out.double(), expected_out, rtol=2e-5, atol=1.0)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fp8_e4m3"])
def test_latents_of_zeros(name):
    """S-11: their scale is the smallest possible; the output is 0, and the lse counts the keys."""
    step = build_fp8(name, (50, 1), magnitude=0.0)
    out, lse = step.attend()
    assert not out.any()
    torch.testing.assert_close(lse, torch.full((1, 4), 50.0).log())


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
@pytest.mark.parametrize("name", ["fp8_block_token", "fp8_block_group"])
@pytest.mark.parametrize("scale", [0.0, 2.0**-149])
@pytest.mark.parametrize("every", [1, 7])
def test_scales_below_those_of_append(name, scale, every):
    """S-11: readers take any; a key of which nothing is left still counts, with a score of 0."""
    step = build_fp8(name, (70, 3))
    slots = slots_of(step, 0)
    scales = step.cache.scales.view(-1)
    group = step.cache.latents[..., 0].numel() // len(scales)
    scales[slots[::every] // group] = scale
    rows = step.cache.latents.flatten(0, 1)[slots]
    step.keys = [values_of(name, rows, scales[slots // group][:, None])]
    assert_close(step.attend(), dense(step))


@pytest.mark.parametrize("every", [1, 7])
def test_rows_of_656_bytes_whose_scales_are_zeros(every):
    """S-11: memory of zeros is such a row; its value is 0, and its score what k_pe makes of it."""
    step = build_fp8("fp8_ds_mla", (70, 3), (33, 1))
    slots = slots_of(step, 0)
    rows = step.cache.latents.flatten(0, 1)
    scales = rows[:, R : R + 16].contiguous().view(torch.float32)
    scales[slots[::every]] = 0.0
    rows[:, R : R + 16] = scales.view(torch.uint8)
    step.keys = [values_of("fp8_ds_mla", rows[slots], scales[slots]), step.keys[1]]
    assert_close(step.attend(), dense(step))


@each_format
@pytest.mark.parametrize("spelling", ["qlen", "full"])
def test_draft_trees(name, spelling):
    """S-14: siblings do not see each other, in one tile with their context or alone."""
    rows = ((70, 4), (33, 2))
    step = build_fp8(name, *rows, mask=f"tree:{spelling}", max_draft_tokens=4)
    trees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    visible, masks = [], []
    for seq_len, query_len in rows:
        tree = trees[:query_len, :query_len]
        seen = torch.ones(query_len, seq_len, dtype=torch.bool)
        seen[:, seq_len - query_len :] = tree
        visible.append(seen)
        masks.append((tree if spelling == "qlen" else seen).flatten())
    step.mask = torch.cat(masks)
    assert_close(step.attend(), dense(step, visible))


@each_format
def test_batch_invariant_rows(name):
    """S-20: a row's bits do not depend on its batch mates."""
    together = build_fp8(name, (130, 1), (70, 3), (5, 5), batch_invariant=True, num_heads=16)
    alone = build_fp8(name, (130, 1), batch_invariant=True, num_heads=16)
    assert_close(together.attend(), dense(together))
    first = replace(
        together,
        rows=together.rows[:1],
        cu_seqlens_q=together.cu_seqlens_q[:2],
        seq_lens=together.seq_lens[:1],
        block_table=together.block_table[:1],
        q_nope=together.q_nope[:1],
        q_pe=together.q_pe[:1],
    )
    mla = PagedMla(alone.config, "cpu")
    for mine, theirs in zip(first.attend(mla, 5), together.attend(None, 5), strict=True):
        assert torch.equal(mine, theirs[:1])


@each_format
def test_fast_products_are_served_exactly(name):
    """S-11: what has no FP8 products has the same bits."""
    exact = build_fp8(name, (70, 3), (33, 1))
    fast = build_fp8(name, (70, 3), (33, 1), products="fast")
    for mine, theirs in zip(fast.attend(), exact.attend(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_layers_scale_is_read_when_it_is_needed():
    """S-11, S-17: it may change on the device between two launches."""
    step = build_fp8("fp8_e4m3", (70, 3), softmax_scale=0.05)
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    step.cache.scales.fill_(3 * LAYER_SCALE)
    step.keys = [keys * 3 for keys in step.keys]
    assert_close(step.attend(mla), dense(step))


@each_format
def test_a_step_appends_and_attends(name):
    """S-10, S-17: eager and compiled, over the tokens that the step itself wrote."""
    step = build_fp8(name, (48, 16), (20, 4))
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        mla = PagedMla(step.config, "cpu")
        latents, scales = (t if t is None else t.clone() for t in step.cache[1:])

        def whole_step(latents, scales, mla=mla):
            cache = LatentCache(name, latents, scales)
            mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=20))
            mla.append(step.q_nope[:, 0], step.q_pe[:, 0], cache)
            return mla.attend(step.q_nope, step.q_pe, cache)[0].clone()

        torch._dynamo.reset()
        out = wrap(whole_step)(latents, scales)
        found.append([out, latents, torch.zeros(1) if scales is None else scales.nan_to_num()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(found[0][1], step.cache.latents)
