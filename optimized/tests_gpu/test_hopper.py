"""The Gluon kernels, at the heads and queries that each of their tiles serves."""

from dataclasses import replace

import pytest
import torch
from gpu_step import CONFIG, Model, P, R, make_batch, random_lens, same

from paged_mla_optimized import PagedMla
from paged_mla_optimized.planning.choice import demand_of, most_query_len
from paged_mla_optimized.planning.families import PORTABLE, portable_variant, serving_variant
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

DECODE = replace(CONFIG, max_query_tokens=CONFIG.max_rows)
E4M3 = replace(CONFIG, cache_format="fp8_e4m3")
EXACT = replace(E4M3, num_heads=128)
ROWS = replace(CONFIG, cache_format="fp8_ds_mla")
MIXED = random_lens(E4M3, 13, 100, 3)
RAGGED = [(2000, 1), (0, 0), (63, 1), (0, 1), (700, 1), (64, 1), (3900, 1), (1, 1)]
PAIRED = [(2000, 2), (0, 0), (62, 2), (0, 1), (700, 1), (63, 2), (3900, 2), (0, 2)]
STEPS = {
    "16-heads": (DECODE, RAGGED),
    "32-heads": (replace(DECODE, num_heads=32), RAGGED),
    "64-heads": (replace(DECODE, num_heads=64), RAGGED),
    "128-heads": (replace(DECODE, num_heads=128), RAGGED),
    "even-rows": (replace(DECODE, num_heads=128), [(1023, 1)] * 16),
    "one-row": (DECODE, [(4095, 1)]),
    "many-partials": (replace(DECODE, num_heads=128), [(4095, 1)]),
    "batch-invariant-one-split": (
        replace(
            DECODE, num_heads=128, batch_invariant=True, max_rows=4096, max_query_tokens=4096
        ),  # so many rows that partials of more splits would take too much room
        RAGGED,
    ),
    "four-lanes": (replace(CONFIG, num_heads=128), [(1022, 2)] * 14),
    "mixed": (replace(CONFIG, num_heads=128), random_lens(CONFIG, 13, 100, 3)),
    "blocks-of-16": (replace(DECODE, block_size=16), [(700, 1), (33, 1), (1600, 1)]),
    "blocks-of-1": (replace(DECODE, block_size=1), [(300, 1), (33, 1), (200, 1)]),
    "rope": (replace(DECODE, rope=Rope(RopePairing.NEOX)), RAGGED),
    "rope-128-heads": (replace(CONFIG, num_heads=128, rope=Rope(RopePairing.INTERLEAVED)), RAGGED),
    "e4m3": (E4M3, RAGGED),
    "e4m3-float16": (replace(E4M3, dtype=torch.float16), RAGGED),
    "e4m3-32-pairs": (E4M3, PAIRED),
    "e4m3-64-pairs": (replace(E4M3, num_heads=32), PAIRED),
    "e4m3-48-pairs": (replace(E4M3, num_heads=24), PAIRED),
    "e4m3-128-pairs": (replace(E4M3, num_heads=64), PAIRED),
    "e4m3-128-heads": (EXACT, MIXED),
    "e4m3-128-heads-float16": (replace(EXACT, dtype=torch.float16), MIXED),
    "e4m3-128-heads-non-causal": (replace(EXACT, mask="non_causal"), MIXED),
    "e4m3-128-heads-batch-invariant": (replace(EXACT, batch_invariant=True), MIXED),
    "e4m3-128-heads-rope": (replace(EXACT, rope=Rope(RopePairing.INTERLEAVED)), MIXED),
    "e4m3-128-heads-even-rows": (EXACT, [(1023, 1)] * 16),
    "e4m3-128-heads-blocks-of-16": (replace(EXACT, block_size=16), MIXED),
    "e4m3-128-heads-blocks-of-1": (
        replace(EXACT, block_size=1, batch_invariant=True),
        [(300, 2), (33, 1), (200, 3)],
    ),
    "e4m3-128-heads-tree": (
        replace(EXACT, mask="tree:qlen", max_draft_tokens=8),
        [(100, 8), (333, 5), (0, 0), (64, 8), (0, 3)],
    ),
    "token-scales-128-heads": (replace(EXACT, cache_format="fp8_block_token"), MIXED),
    "group-scales-128-heads": (replace(EXACT, cache_format="fp8_block_group"), MIXED),
    "group-scales-128-heads-blocks-of-4": (
        replace(EXACT, cache_format="fp8_block_group", block_size=4),
        [(700, 2), (33, 1), (1600, 3)],
    ),
    "e4m3-many-partials": (replace(E4M3, num_heads=64), [(4095, 1)]),
    "e4m3-batch-invariant": (replace(E4M3, batch_invariant=True), PAIRED),
    "e4m3-batch-invariant-64-pairs": (replace(E4M3, num_heads=32, batch_invariant=True), PAIRED),
    "e4m3-non-causal": (replace(E4M3, mask="non_causal"), PAIRED),
    "e4m3-tree": (
        replace(E4M3, num_heads=8, mask="tree:qlen", max_draft_tokens=8),
        [(100, 8), (333, 5), (0, 0), (64, 8), (0, 3)],
    ),
    "e4m3-blocks-of-16": (replace(E4M3, block_size=16), [(700, 1), (33, 1), (1600, 1)]),
    "e4m3-blocks-of-1": (replace(E4M3, block_size=1), [(300, 1), (33, 1), (200, 1)]),
    "scaled-shares": (ROWS, RAGGED),
    "scaled-shares-float16": (replace(ROWS, dtype=torch.float16), RAGGED),
    "scaled-shares-32-pairs": (ROWS, PAIRED),
    "scaled-shares-32-pairs-batch-invariant": (replace(ROWS, batch_invariant=True), PAIRED),
    "scaled-shares-64-pairs": (replace(ROWS, num_heads=32), PAIRED),
    "scaled-shares-128-heads": (replace(ROWS, num_heads=128), MIXED),
    "scaled-shares-128-heads-float16": (replace(ROWS, num_heads=128, dtype=torch.float16), MIXED),
    "scaled-shares-128-heads-batch-invariant": (
        replace(ROWS, num_heads=128, batch_invariant=True),
        MIXED,
    ),
    "scaled-shares-128-heads-rope": (
        replace(ROWS, num_heads=128, rope=Rope(RopePairing.INTERLEAVED)),
        MIXED,
    ),
    "scaled-shares-128-heads-tree": (
        replace(ROWS, num_heads=128, mask="tree:qlen", max_draft_tokens=8),
        [(100, 8), (333, 5), (0, 0), (64, 8), (0, 3)],
    ),
    "scaled-shares-128-heads-blocks-of-1": (
        replace(ROWS, num_heads=128, block_size=1),
        [(300, 2), (33, 1), (200, 3)],
    ),
    "gathered": (replace(CONFIG, num_heads=128, block_size=4), [(700, 2), (33, 1), (1600, 3)]),
}


@pytest.fixture(autouse=True)
def _needs_hopper():
    arch = device_facts(torch.device("cuda", 0)).arch
    if arch != "sm90":
        pytest.skip(f"{arch} has no Gluon kernels")


@pytest.mark.parametrize("name", STEPS)
def test_a_thousand_repeats(name):
    """S-9, S-17, S-20: the portable kernel's output; and the same bits over NaN, every time."""
    config, lens = STEPS[name]
    demand = demand_of(config, "sm90")
    longest = max(query_len for _, query_len in lens)
    assert serving_variant(demand, longest).family != PORTABLE
    portable = portable_variant(demand, most_query_len(config))
    batch = make_batch(config, lens, 1)
    model = Model(PagedMla(config), longest)
    out, lse, _ = model.eager(batch)
    for mine, theirs in zip(
        (out, lse), Model(PagedMla(config, variant=portable)).eager(batch)[:2], strict=True
    ):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(250):  # four layers each
        if i % 10 == 0:
            model.mla.workspace.fill_(torch.nan)
        again, lse_again = model.layers(batch)
        wrong += (again.view(torch.int16) != out.view(torch.int16)).sum()
        wrong += (lse_again.view(torch.int32) != lse.view(torch.int32)).sum()
    assert wrong.item() == 0
    assert same(model.layers(batch)[0], out)


@pytest.mark.parametrize("name", ["one-row", "many-partials", "e4m3-many-partials"])
def test_partials_that_are_no_numbers_are_not_empty(name):
    """S-8: a query that is none shows where the partials of its row are joined."""
    config, lens = STEPS[name]
    batch = make_batch(config, lens, 1)
    batch.tokens["q"][0, :, 5] = torch.nan
    out, lse, _ = Model(PagedMla(config), 1).eager(batch)
    assert out[:, 0, 5].isnan().all()
    assert lse[:, 0, 5].isnan().all()
    assert lse[:, 0, :5].isfinite().all()


@pytest.mark.parametrize("num_heads", [16, 32, 128])
def test_shares_of_small_scales_keep_their_bits(num_heads):
    """S-11: columns are as near to those of the portable kernel as others, however small."""
    config = replace(ROWS, num_heads=num_heads, max_query_tokens=ROWS.max_rows)
    batch = make_batch(config, RAGGED, 1)
    answers = []
    for variant in (None, portable_variant(demand_of(config, "sm90"), 1)):
        model = Model(PagedMla(config, variant=variant), 1)
        scales = model.contents[..., R : R + 16].view(torch.float32)
        scales *= torch.tensor([1.0, 2.0**-20, 2.0**-10, 2.0**-15], device="cuda")
        answers.append(model.eager(batch)[0].float().unflatten(-1, (4, R // 4)))
    mine, theirs = answers
    off = (mine - theirs).norm(dim=-1)
    assert (off <= 2e-2 * theirs.norm(dim=-1)).all()


@pytest.mark.parametrize("num_heads", [16, 32, 128])
@pytest.mark.parametrize(
    ("dtype", "cache_format"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.bfloat16, "fp8_e4m3")],
    ids=["bf16", "fp16", "e4m3"],
)
@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("is_fixed", [False, True], ids=["parts", "fixed"])
def test_kernels_rotate_as_the_launch_does(is_fixed, pairing, dtype, cache_format, num_heads):
    """S-12: bit for bit the outputs for queries that were rotated before; strided and padded."""
    given = replace(
        CONFIG,
        num_heads=num_heads,
        dtype=dtype,
        cache_format=cache_format,
        batch_invariant=is_fixed,
    )
    mla, plain = PagedMla(replace(given, rope=Rope(pairing))), PagedMla(given)
    model = Model(mla)
    model.caches.copy_(model.contents)
    rotate = mla._core.rotate
    decode, verify = ([(n, q) for n in (2000, 63, 0, 700, 64, 3900)] + [(0, 0)] for q in (1, 3))
    for lens in (decode, verify, [(3900, 100)]):
        query_len = lens[0][1]
        batch = make_batch(given, lens, 1)
        tokens = batch.num_tokens + 2
        q = torch.full((tokens, 2, num_heads, R + P), torch.nan, dtype=dtype, device="cuda")[:, 1]
        q[:-2] = batch.tokens["q"][:, 0]
        q_nope, q_pe = q[..., :R], q[..., R:]
        lengths = batch.cu_seqlens_q, batch.seq_lens, batch.block_table
        for instance in (mla, plain):
            instance.plan(MlaStep(*lengths, num_tokens=tokens, max_query_len=query_len))
        rotate.q_pe.fill_(torch.nan)
        found = mla.attend(q_nope, q_pe, model.cache(0))
        assert rotate.q_pe.isnan().all()  # nothing was launched before
        turned = rotate.launch(q_pe, mla.positions)[:tokens]
        expected = plain.attend(q_nope, turned, model.cache(0))
        assert found[0][:-2].isfinite().all()
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])


def at_odd_address(tensor):
    """Return room for as many elements, two bytes into its storage."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view(tensor.shape)


def with_odd_strides(tensor):
    """Return room for as many elements, whose heads are no multiple of 16 of them apart."""
    *shape, width = tensor.shape
    return torch.zeros(*shape, width + 8, dtype=tensor.dtype, device="cuda")[..., :width]


@pytest.mark.parametrize("odd", [at_odd_address, with_odd_strides])
@pytest.mark.parametrize("name", ["16-heads", "128-heads"])
def test_odd_queries_and_outputs(name, odd):
    """S-5: the portable kernel serves queries that cannot be copied, with outputs of any stride."""
    config, lens = STEPS[name]
    batch = make_batch(config, lens, 1)
    model = Model(PagedMla(config))
    out, lse, _ = model.eager(batch)
    q, cache = batch.tokens["q"][:, 0], model.caches[0]
    q_nope, q_pe = q[..., :R], q[..., R:]
    answer = odd(out[0])
    model.mla.attend(q_nope, q_pe, cache, out=answer)
    assert same(answer, out[0])
    for queries in ((odd(q_nope).copy_(q_nope), q_pe), (q_nope, odd(q_pe).copy_(q_pe))):
        found = model.mla.attend(*queries, cache)
        torch.testing.assert_close(found[0].float(), out[0].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found[1], lse[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("odd", [at_odd_address, with_odd_strides])
@pytest.mark.parametrize("name", ["rope", "rope-128-heads"])
def test_odd_queries_that_are_rotated(name, odd):
    """S-12: the same kernel loads them, to the same bits."""
    config, lens = STEPS[name]
    batch = make_batch(config, lens, 1)
    model = Model(PagedMla(config))
    out, lse, _ = model.eager(batch)
    q = batch.tokens["q"][:, 0]
    q_pe = odd(q[..., R:]).copy_(q[..., R:])
    found = model.mla.attend(q[..., :R], q_pe, model.caches[0])
    assert same(found[0], out[0])
    assert same(found[1], lse[0])
