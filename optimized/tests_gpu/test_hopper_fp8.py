"""The Gluon kernel of FP8 products, compared with the portable kernel on the same inputs."""

from dataclasses import replace

import pytest
import torch
from gpu_step import CONFIG, LAYERS, Model, P, R, make_batch, random_lens, same

from paged_mla_optimized import PagedMla
from paged_mla_optimized.planning.choice import demand_of, most_query_len
from paged_mla_optimized.planning.families import TILE_FP8, portable_variant, serving_variant
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

FAST = replace(CONFIG, num_heads=128, cache_format="fp8_e4m3", products="fast")
DECODE = replace(FAST, max_query_tokens=FAST.max_rows)
TOKEN, GROUP = {"cache_format": "fp8_block_token"}, {"cache_format": "fp8_block_group"}
TREE = {"mask": "tree:qlen", "max_draft_tokens": 8}
RAGGED = [(2000, 1), (0, 0), (63, 1), (0, 1), (700, 1), (64, 1), (3900, 1), (1, 1)]
MIXED = random_lens(FAST, 13, 100, 3)
STEPS = {
    "64-heads": (replace(DECODE, num_heads=64), RAGGED),
    "128-heads": (DECODE, RAGGED),
    "float16": (replace(DECODE, dtype=torch.float16), RAGGED),
    "even-rows": (DECODE, [(1023, 1)] * 16),
    "one-row": (DECODE, [(4095, 1)]),
    "four-lanes": (FAST, [(1022, 2)] * 14),
    "mixed": (FAST, MIXED),
    "non-causal": (replace(FAST, mask="non_causal"), MIXED),
    "batch_invariant": (replace(FAST, batch_invariant=True), MIXED),
    "tree": (replace(FAST, num_heads=16, **TREE), [(100, 8), (333, 5), (0, 0), (64, 8), (0, 3)]),
    "blocks-of-16": (replace(DECODE, block_size=16), [(700, 1), (33, 1), (1600, 1)]),
    "blocks-of-1": (replace(DECODE, block_size=1), [(300, 1), (33, 1), (200, 1)]),
    "gathered": (replace(FAST, block_size=4), [(700, 2), (33, 1), (1600, 3)]),
    "rope": (replace(FAST, rope=Rope(RopePairing.INTERLEAVED)), RAGGED),
    "token-scales": (replace(DECODE, **TOKEN), RAGGED),
    "token-scales-mixed": (replace(FAST, **TOKEN), MIXED),
    "token-scales-blocks-of-1": (
        replace(DECODE, block_size=1, **TOKEN),
        [(300, 1), (33, 1), (200, 1)],
    ),
    "group-scales": (replace(DECODE, **GROUP), RAGGED),
    "group-scales-tree": (
        replace(FAST, num_heads=16, block_size=16, **GROUP, **TREE),
        [(100, 8), (333, 5), (0, 0), (64, 8), (0, 3)],
    ),
    "group-scales-blocks-of-4": (
        replace(FAST, block_size=4, **GROUP),
        [(700, 2), (33, 1), (1600, 3)],
    ),
}


@pytest.fixture(autouse=True)
def _needs_hopper():
    arch = device_facts(torch.device("cuda", 0)).arch
    if arch != "sm90":
        pytest.skip(f"{arch} has no Gluon kernels")


def fast_model(name):
    """Return a model that is served by the kernel, and a step for it."""
    config, lens = STEPS[name]
    longest = max(query_len for _, query_len in lens)
    assert serving_variant(demand_of(config, "sm90"), longest).family == TILE_FP8
    return Model(PagedMla(config), longest), make_batch(config, lens, 1)


def assert_close_to_exact(model, batch, out, lse):
    """Compare outputs with exact outputs for the queries that the last layer's kernel got.

    A weight is off by 1 / 16 of itself at most, and the others of its pair by as much the other
    way; their sum as well. So is the lse, and by what queries are rounded by here.
    """
    quantize, tokens = model.mla._core.quantize, batch.num_tokens
    codes = quantize.codes[:tokens].view(torch.float8_e4m3fn).float()
    q = (codes * quantize.scales[:tokens, :, None]).to(model.mla.config.dtype)
    # Queries and keys are rotated by now.
    config = replace(model.mla.config, products="exact", rope=None)
    variant = portable_variant(demand_of(config, "sm90"), most_query_len(config))
    exact = PagedMla(config, variant=variant)
    lengths = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    exact.plan(MlaStep(*lengths, num_tokens=tokens, mask=batch.mask))
    expected, expected_lse = exact.attend(q[..., :R], q[..., R:], model.cache(LAYERS - 1))
    torch.testing.assert_close(lse, expected_lse, rtol=0.0, atol=0.0645 + 0.03)
    off = (out.float() - expected.float()).norm(dim=-1)
    size = expected.float().norm(dim=-1)
    assert (off <= 2 / 15 * size).all()
    assert off.norm() <= 0.04 * size.norm()


@pytest.mark.parametrize("name", STEPS)
def test_a_thousand_repeats(name):
    """S-9, S-17, S-20: close to exact outputs; and the same bits over NaN, every time."""
    model, batch = fast_model(name)
    model.mla.workspace.fill_(torch.nan)
    out, lse, _ = model.eager(batch)
    assert_close_to_exact(model, batch, out[-1], lse[-1])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(250):  # four layers each
        if i % 10 == 0:
            model.mla.workspace.fill_(torch.nan)
        again, lse_again = model.layers(batch)
        wrong += (again.view(torch.int16) != out.view(torch.int16)).sum()
        wrong += (lse_again.view(torch.int32) != lse.view(torch.int32)).sum()
    assert wrong.item() == 0


def test_the_first_launch_is_right():
    """S-9: a new instance over NaN, with nothing of a launch before it to lean on."""
    model, batch = fast_model("128-heads")
    model.restore(batch)
    model.mla.workspace.fill_(torch.nan)
    model.outs.fill_(torch.nan)
    model.plan(batch, batch.num_tokens)
    layer = LAYERS - 1
    q, kv = batch.tokens["q"][:, layer], batch.tokens["kv"][:, layer]
    model.mla.append(kv[:, :R], kv[:, R:], model.cache(layer))
    out, lse = model.outs[layer, : len(q)], model.lses[layer, : len(q)]
    model.mla.attend(q[..., :R], q[..., R:], model.cache(layer), out=out, lse=lse)
    assert_close_to_exact(model, batch, out, lse)


def test_codes_times_scales_are_the_queries():
    """S-5, S-11: codes times scales are the queries, but for what e4m3 rounds."""
    model, batch = fast_model("mixed")
    model.eager(batch)
    quantize, q = model.mla._core.quantize, batch.tokens["q"][:, -1].float()
    scales = quantize.scales[: len(q), :, None]
    codes = quantize.codes[: len(q)].view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(scales, q.abs().amax(-1, keepdim=True) / 448, rtol=1e-6, atol=0.0)
    half_step = torch.maximum(q.abs() / 16, scales * 2.0**-10)
    assert ((codes * scales - q).abs() <= half_step * (1 + 1e-5)).all()


def test_scales_that_vanish():
    """S-4, S-7: where their product is 0 in float32, visible keys still weigh alike."""
    model, batch = fast_model("mixed")
    model.scales.fill_(1e-30)
    batch.tokens["q"].fill_(0.0)
    out, lse, _ = model.eager(batch)
    visible = model.mla._core.plan.positions[: batch.num_tokens] + 1
    torch.testing.assert_close(lse, visible.log()[:, None].expand_as(lse), rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["token-scales", "group-scales"])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 2.0**-40])
def test_scales_that_vanish_next_to_others(name, scale):
    """S-11: keys are weighted by the exact products of codes and scales, for any scales."""
    model, batch = fast_model(name)
    model.scale_contents[..., ::2] = scale
    out, lse, _ = model.eager(batch)
    assert_close_to_exact(model, batch, out[-1], lse[-1])


@pytest.mark.parametrize("name", ["token-scales", "group-scales"])
def test_scales_that_are_no_numbers_stay_visible(name):
    """S-11: a NaN key makes the outputs that see it NaN, and no others."""
    model, batch = fast_model(name)
    out, lse, _ = model.eager(batch)
    row = 0  # whose first block holds cached keys alone
    model.scale_contents[:, batch.block_table[row, 0], 0, 1] = torch.nan
    found, found_lse, _ = model.eager(batch)
    tokens = slice(*batch.cu_seqlens_q[row : row + 2].tolist())
    assert found[:, tokens].isnan().all()
    assert found_lse[:, tokens].isnan().all()
    found[:, tokens], found_lse[:, tokens] = out[:, tokens], lse[:, tokens]
    assert same(found, out)
    assert same(found_lse, lse)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [3, R + P - 1])
def test_what_is_no_number_stays_visible(bad, column):
    """S-5: its query's output and lse are NaN; that of zeros is the mean, all others as before.

    A thread weighs pairs eight apart, whose peaks rise together: their outputs are as close as
    rounding relative to a peak allows.
    """
    model, batch = fast_model("mixed")
    out, lse, _ = model.eager(batch)
    token = batch.num_tokens - 1
    batch.tokens["q"][token, :, 5, column] = bad
    batch.tokens["q"][token, :, 7] = 0.0
    found, found_lse, _ = model.eager(batch)
    assert found[:, token, 5].isnan().all()
    assert found_lse[:, token, 5].isnan().all()
    keys = torch.log(batch.seq_lens[batch.cu_seqlens_q.diff() > 0][-1].float())
    torch.testing.assert_close(found_lse[:, token, 7], keys.expand(LAYERS), rtol=1e-5, atol=0.0)
    beside = [13, 15]
    torch.testing.assert_close(found_lse[:, token, beside], lse[:, token, beside])
    off = (found[:, token, beside].float() - out[:, token, beside].float()).norm(dim=-1)
    assert (off <= 2 / 15 * out[:, token, beside].float().norm(dim=-1)).all()
    for each in (5, 7, *beside):
        found[:, token, each], found_lse[:, token, each] = out[:, token, each], lse[:, token, each]
    assert same(found, out)
    assert same(found_lse, lse)
