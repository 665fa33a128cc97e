"""Lengths, tables and slots that no step has, in front of every family of kernels (S-2, S-9)."""

from dataclasses import replace

import pytest
import torch
from gpu_step import BLOCKS, CONFIG, P, R, make_batch

from paged_mla_optimized import LatentCache, PagedMla
from paged_mla_optimized.tensors.latent_cache import ROW_DTYPES
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

LENS = [(70, 2), (100, 3), (63, 1)]  # the second row is made illegal
LEGAL, ILLEGAL = [0, 1, 5], [2, 3, 4]
FP8 = {"cache_format": "fp8_e4m3"}
CONFIGS = {
    "few": CONFIG,
    "few-no-box": replace(CONFIG, block_size=20),
    "few-batch-invariant": replace(CONFIG, num_heads=3, batch_invariant=True, block_size=12),
    "few-rope": replace(CONFIG, rope=Rope(RopePairing.NEOX)),
    "tile": replace(CONFIG, num_heads=128),
    "tile-no-box": replace(CONFIG, num_heads=128, block_size=2),
    "tile-batch-invariant": replace(CONFIG, num_heads=64, batch_invariant=True),
    "few-fp8": replace(CONFIG, **FP8),
    "few-656": replace(CONFIG, cache_format="fp8_ds_mla"),
    "few-token-scales": replace(CONFIG, cache_format="fp8_block_token", block_size=4),
    "tile-exact": replace(CONFIG, num_heads=128, **FP8),
    "tile-exact-groups": replace(CONFIG, num_heads=128, cache_format="fp8_block_group"),
    "tile-fp8": replace(CONFIG, num_heads=128, products="fast", **FP8),
    "tile-fp8-tokens": replace(
        CONFIG, num_heads=128, products="fast", cache_format="fp8_block_token"
    ),
    "portable": replace(CONFIG, dtype=torch.float32, cache_format="fp32"),
}
SPOILT = {
    "short": ("seq_lens", 2),
    "below-0": ("seq_lens", -5),
    "too-long": ("seq_lens", 2**31 - 1),
    "past-the-table": ("seq_lens", 4000),
    "block-below-0": ("block_table", -1),
    "smallest-block": ("block_table", -(2**31)),
    "block-past-the-cache": ("block_table", BLOCKS),
    "largest-block": ("block_table", 2**31 - 1),
    "begins-below-0": ("cu_seqlens_q", -7),
    "does-not-ascend": ("cu_seqlens_q", 9),
}


def new_cache(config, junk):
    """Return a cache between blocks that no call may touch, and all its bytes and scales."""
    stored = config.stored
    dtype, width = stored.row(config)
    shape = (BLOCKS + 2, config.block_size, width)
    generator = torch.Generator("cuda").manual_seed(junk)
    if config.is_fp8:  # any e4m3 but NaN, and plain scales inside rows
        rows = torch.randint(0, 0x70, shape, dtype=torch.uint8, device="cuda", generator=generator)
        if stored.inline_scales:
            rows[..., R : R + 4 * stored.inline_scales].view(torch.float32).fill_(0.01)
            rows[..., R + 4 * stored.inline_scales :].view(torch.bfloat16).fill_(0.5)
    else:
        rows = torch.randn(shape, device="cuda", generator=generator).to(ROW_DTYPES[dtype])
    scale_shape = stored.scale_shape(BLOCKS + 2, config.block_size)
    scales = None if scale_shape is None else torch.full(scale_shape, 0.01, device="cuda")
    inner = scales[1:-1] if scales is not None and scales.ndim else scales
    return LatentCache(stored.name, rows[1:-1], inner), rows, scales


def step_of(config, batch, junk, keep):
    """Return outputs, slots and the final cache; blocks not in `keep` are filled with `junk`."""
    cache, rows, scales = new_cache(config, 1)
    _, other_rows, _ = new_cache(config, junk)
    foreign = torch.ones(BLOCKS + 2, dtype=torch.bool, device="cuda")
    foreign[keep + 1] = False
    rows[foreign] = other_rows[foreign]
    before = rows.clone()
    mla = PagedMla(config, "cuda")
    tokens = batch.num_tokens
    lengths = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    mla.plan(MlaStep(*lengths, num_tokens=tokens, max_query_len=1))  # chooses the family
    kv, q = batch.tokens["kv"][:, 0], batch.tokens["q"][:, 0]
    mla.append(kv[:, :R], kv[:, R:], cache)
    changed = (rows != before).flatten(1).any(1)
    outs = torch.full((tokens + 16, config.num_heads, R), 5.0, dtype=config.dtype, device="cuda")
    lses = torch.full(outs.shape[:2], 5.0, device="cuda")
    q = q.contiguous()
    mla.attend(q[..., :R], q[..., R:], cache, out=outs[8:-8], lse=lses[8:-8])
    for rest in (outs[:8], outs[-8:], lses[:8], lses[-8:]):
        assert (rest == 5).all()
    if scales is not None and scales.ndim:
        assert (scales[[0, -1]] == scales.new_tensor(0.01)).all()
    return outs[8:-8].clone(), lses[8:-8].clone(), mla.slot_mapping.clone(), changed


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_no_step_has(name, spoilt):
    """Legal rows keep their outputs, and no other row's memory is read or written."""
    config = CONFIGS[name]
    batch = make_batch(config, LENS, 1)
    size = config.block_size
    counts = [-(-(context + query) // size) for context, query in LENS]
    own = [batch.block_table[row, :count].long() for row, count in enumerate(counts)]
    whole = step_of(config, batch, 2, torch.cat(own))
    which, value = SPOILT[spoilt]
    if which == "seq_lens":
        batch.seq_lens[1] = value
    elif which == "block_table":
        batch.block_table[1, counts[1] - 1] = value
        batch.block_table[1, 0] = value
        own[1] = own[1][1 : counts[1] - 1]
    else:
        batch.cu_seqlens_q[1 if value > 0 else 0] = value
    legal = {"begins-below-0": [2, 3, 4, 5], "does-not-ascend": []}.get(spoilt, LEGAL)
    keep = torch.cat(own)
    first, second = (step_of(config, batch, junk, keep) for junk in (2, 3))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    out, lse, slots, changed = first
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out[legal], whole[0][legal], **tolerance)
    torch.testing.assert_close(lse[legal], whole[1][legal], **tolerance)
    assert torch.equal(slots[legal], whole[2][legal])
    written = torch.zeros_like(changed)
    inside = (slots >= 0) & (slots < BLOCKS * size)  # a plan does not know how large a cache is
    written[slots[inside] // size + 1] = True
    assert not (changed & ~written).any()
    if which == "seq_lens":
        assert (out[ILLEGAL] == 0).all()
        assert (lse[ILLEGAL] == -torch.inf).all()
        assert (slots[ILLEGAL] == -1).all()


def test_short_rows_of_a_non_causal_mask():
    """S-2: one key and three queries, in every family: each query's output is that key."""
    for heads in (1, 16, 128):
        config = replace(CONFIG, num_heads=heads, mask="non_causal", rope=Rope(RopePairing.NEOX))
        mla = PagedMla(config, "cuda")
        cache = torch.randn(8, 64, R + P, device="cuda").to(config.dtype)
        starts = torch.tensor([0, 3, 5], dtype=torch.int32, device="cuda")
        table = torch.tensor([[3, 9], [5, 6]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([1, 100], dtype=torch.int32, device="cuda")
        mla.plan(MlaStep(starts, lens, table, num_tokens=5, max_query_len=1))
        q = torch.randn(5, heads, R + P, device="cuda").to(config.dtype)
        out, lse = mla.attend(q[..., :R], q[..., R:], cache)
        key = cache[3, 0, :R].expand(3, heads, R)
        torch.testing.assert_close(out[:3], key, rtol=1e-2, atol=1e-2)
        assert lse.isfinite().all()
        assert mla.slot_mapping.tolist() == [-1, -1, 3 * 64, 6 * 64 + 34, 6 * 64 + 35]
