"""S-9: steps, masks and caches whose indices and addresses pass 16, 31, 32 and 33 bits."""

from itertools import pairwise

import pytest
import torch
from gpu_prefill import prefix_sums
from gpu_step import P, R, bits, instance_of, same

from paged_mla_optimized import (
    DraftSteps,
    ExtendWindow,
    HeadWeights,
    LayerConfig,
    MlaConfig,
    MlaLayer,
    Prefill,
    PrefillConfig,
    merge_partials,
)
from paged_mla_optimized.config.limits import MAX_ROWS
from paged_mla_optimized.planning.families import FEW, FEW_FP8, PORTABLE, TILE, TILE_EXACT, TILE_FP8
from paged_mla_optimized.tensors.latent_cache import as_bytes, empty_cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

TOKENS = (65535, 65536, 65537)
MOST = TOKENS[-1]
PIECE = 30000  # tokens of the steps that large ones are held against
BLOCK = 16
ROPE = Rope(RopePairing.INTERLEAVED)
SIZES = {"softmax_scale": 192**-0.5, "block_size": BLOCK}
STRICT = {**SIZES, "batch_invariant": True}
FEW_QUERIES, MANY_QUERIES = 32, 1023
FP8, HEADS_128 = {"cache_format": "fp8_e4m3"}, {"num_heads": 128}
KERNELS = {  # what serves it on Hopper; answers of 65537 tokens of 128 heads pass 2^32 elements
    "few": (FEW, FEW_QUERIES, {"num_heads": 1}),
    "tile": (TILE, MANY_QUERIES, HEADS_128),
    "tile-rope": (TILE, MANY_QUERIES, {**HEADS_128, "rope": ROPE}),
    "few-fp8": (FEW_FP8, FEW_QUERIES, {"num_heads": 1, **FP8}),
    "tile-exact": (TILE_EXACT, MANY_QUERIES, {**HEADS_128, **FP8}),
    "tile-fp8": (TILE_FP8, MANY_QUERIES, {**HEADS_128, **FP8, "products": "fast"}),
    "portable": (PORTABLE, MANY_QUERIES, HEADS_128),
    "portable-rows-with-scales": (
        PORTABLE, FEW_QUERIES, {"num_heads": 16, "cache_format": "fp8_ds_mla"},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_memory():
    free = torch.cuda.mem_get_info()[0]
    if free < 64 << 30:
        pytest.skip(f"{free >> 30} GiB of memory free, needs 64")
    yield
    torch.cuda.empty_cache()


def normal(*sizes, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)


def query_lens(longest):
    """Return rows of `longest` tokens and, last, some of one token: 65537 together."""
    many = (MOST - 40) // longest
    return [longest] * many + [1] * (MOST - many * longest)


def instance(name, *, longest, **sizes):
    """Return an instance that is served by the kernel that `name` is for."""
    family, _, changes = KERNELS[name]
    config = MlaConfig(**(STRICT | sizes | changes))
    return instance_of(family, config, longest)


def spoilt_cache(config, blocks):
    """Return a cache of NaN; a format with one scale a layer has 0.02 for it."""
    cache = empty_cache(config, blocks, "cuda")
    nan = 255 if config.is_fp8 else torch.nan  # a byte of all ones is NaN
    latents_of(cache).fill_(nan)
    if cache.scales is not None:
        cache.scales.fill_(torch.nan if cache.scales.ndim else 0.02)
    return cache


def latents_of(cache):
    return as_bytes(cache.latents)


class Rows:
    """Many rows of a cache, and tokens with queries for them."""

    def __init__(self, config, lens):
        """Take rows (seq_len, query_len), each with blocks of its own."""
        self.config, self.longest = config, max(query_len for _, query_len in lens)
        seq_lens = torch.tensor([seq_len for seq_len, _ in lens])
        counts = (seq_lens + BLOCK - 1) // BLOCK
        ends = counts.cumsum(0)
        self.blocks = int(ends[-1])
        column = torch.arange(int(counts.max()))
        table = (ends - counts)[:, None] + column
        table = torch.where(column < counts[:, None], table, 2**31 - 1)
        self.table, self.seq_lens = table.int().cuda(), seq_lens.int().cuda()
        self.starts = prefix_sums([query_len for _, query_len in lens])
        self.tokens = int(self.starts[-1])
        self.kv = normal(self.tokens, R + P, seed=2)
        self.q = normal(self.tokens, config.num_heads, R + P, seed=3)

    def pieces(self):
        """Cut the rows in three; return the first and the last of each."""
        third = len(self.seq_lens) // 3
        return list(pairwise([0, third, 2 * third, len(self.seq_lens)]))

    def rows_of(self, tokens):
        """Return how many rows the first `tokens` tokens are; the last ones have one each."""
        return len(self.seq_lens) - (self.tokens - tokens)

    def plan(self, mla, first, last):
        """Plan rows `first` to `last`; return their tokens."""
        starts = self.starts[first : last + 1]
        begin, end = int(starts[0]), int(starts[-1])
        rows = slice(first, last)
        lengths = starts - starts[0], self.seq_lens[rows], self.table[rows]
        mla.plan(MlaStep(*lengths, num_tokens=end - begin, max_query_len=self.longest))
        return slice(begin, end)

    @property
    def slots(self):
        """Slot and position of each token; blocks of a row follow each other."""
        token = torch.arange(self.tokens, device="cuda")
        row = torch.searchsorted(self.starts, token.int(), right=True) - 1
        ends = self.starts[1:][row]
        positions = (self.seq_lens[row] - (ends - token)).long()
        return self.table[row, 0].long() * BLOCK + positions, positions

    def append(self, mla, tokens, cache):
        kv = self.kv[tokens]
        mla.append(kv[:, :R], kv[:, R:], cache)

    def attend(self, mla, tokens, cache):
        q = self.q[tokens]
        return mla.attend(q[..., :R], q[..., R:], cache)


def many_rows(name, context):
    """Return an instance, and rows of 65537 tokens behind up to `context` others."""
    lens = query_lens(KERNELS[name][1])
    longest = lens[0]
    mla = instance(
        name, longest=longest, max_rows=len(lens), max_query_tokens=MOST,
        max_model_len=longest + context,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    contexts = torch.randint(0, context + 1, (len(lens),), generator=generator).tolist()
    return mla, Rows(mla.config, [(c + n, n) for c, n in zip(contexts, lens, strict=True)])


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_a_step(name):
    """S-20: many rows; the bits are those of smaller steps, in caches as well."""
    mla, rows = many_rows(name, context=40)
    cache = spoilt_cache(mla.config, rows.blocks)
    keys = latents_of(cache)
    keys.copy_(normal(*keys.shape) if keys.dtype == torch.bfloat16 else keys.new_full((), 0x31))
    outs, lses = [], []
    for first, last in rows.pieces():
        tokens = rows.plan(mla, first, last)
        rows.append(mla, tokens, cache)
        out, lse = rows.attend(mla, tokens, cache)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    del outs, lses
    slots, positions = rows.slots
    for count in TOKENS:
        before = keys.clone()
        tokens = rows.plan(mla, 0, rows.rows_of(count))
        assert torch.equal(mla.positions, positions[:count])
        assert torch.equal(mla.slot_mapping, slots[:count])
        keys.flatten(0, 1)[slots[:count]] = 0
        rows.append(mla, tokens, cache)
        assert torch.equal(bits(keys), bits(before))
        mine = rows.attend(mla, tokens, cache)
        assert same(mine[0], out[:count])
        assert same(mine[1], lse[:count])


@pytest.mark.parametrize("name", ["tile", "tile-exact", "portable"])
def test_queries_of_a_row(name):
    """S-4: one row of as many queries; the outputs are those of the row in chunks."""
    mla = instance(name, longest=MOST, max_rows=2, max_query_tokens=MOST, max_model_len=MOST)
    rows = Rows(mla.config, [(MOST, MOST)])
    cache = spoilt_cache(mla.config, rows.blocks)
    outs, lses = [], []
    for begin, end in pairwise([0, PIECE, 2 * PIECE, MOST]):
        lengths = prefix_sums([end - begin]), torch.full_like(rows.seq_lens, end), rows.table
        mla.plan(MlaStep(*lengths, num_tokens=end - begin))
        rows.append(mla, slice(begin, end), cache)
        out, lse = rows.attend(mla, slice(begin, end), cache)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    del outs, lses
    before = latents_of(cache).clone()
    for count in TOKENS:
        lengths = prefix_sums([count]), torch.full_like(rows.seq_lens, count), rows.table
        mla.plan(MlaStep(*lengths, num_tokens=count))
        rows.append(mla, slice(0, count), cache)
        assert torch.equal(bits(latents_of(cache)), bits(before))
        mine = rows.attend(mla, slice(0, count), cache)
        for token in range(0, count, 8192):
            piece = slice(token, min(token + 8192, count))
            right = out[piece].float().flatten(1)
            error = (mine[0][piece].float().flatten(1) - right).norm(dim=1) / right.norm(dim=1)
            assert error.max() < 1e-2
        torch.testing.assert_close(mine[1], lse[:count], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["tile", "tile-exact", "portable-rows-with-scales"])
def test_lines_gathered(name):
    """S-10: as many lines of context."""
    mla, rows = many_rows(name, context=0)
    cache = spoilt_cache(mla.config, rows.blocks)
    rows.append(mla, rows.plan(mla, 0, len(rows.seq_lens)), cache)
    right = torch.full((MOST, R + P), torch.nan, device="cuda", dtype=torch.bfloat16)
    for first, last in rows.pieces():
        tokens = rows.plan(mla, first, last)
        mla.gather_context(cache, right[tokens, :R], right[tokens, R:])
    for count in TOKENS:
        rows.plan(mla, 0, rows.rows_of(count))
        found = torch.full_like(right[:count], torch.nan)
        mla.gather_context(cache, found[:, :R], found[:, R:])
        assert same(found, right[:count])


def test_queries_quantized():
    """S-12: codes and scales of each token are those that it has in a smaller step."""
    mla, rows = many_rows("tile-fp8", context=0)

    def quantized(first, last):
        q = rows.q[rows.plan(mla, first, last)]
        return [tensor.clone() for tensor in mla.quantize_queries(q[..., :R], q[..., R:])]

    pieces = [quantized(first, last) for first, last in rows.pieces()]
    right = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    del pieces
    for count in TOKENS:
        for mine, whole in zip(quantized(0, rows.rows_of(count)), right, strict=True):
            assert torch.equal(bits(mine), bits(whole[:count]))


def test_partials_merged():
    """S-8: each token's merged output equals its output with fewer tokens."""
    outs, lses = normal(2, MOST, 128, R).float(), torch.randn(2, MOST, 128, device="cuda")
    pieces = [
        merge_partials(outs[:, begin:end].contiguous(), lses[:, begin:end].contiguous())
        for begin, end in pairwise([0, PIECE, 2 * PIECE, MOST])
    ]
    out, lse = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    del pieces
    for count in TOKENS:
        mine = merge_partials(outs[:, :count].contiguous(), lses[:, :count].contiguous())
        assert same(mine[0], out[:count])
        assert same(mine[1], lse[:count])


@pytest.mark.parametrize("value", [128, 256], ids=["hopper", "portable"])
@pytest.mark.parametrize("shape", ["rows", "prompt"])
def test_prefill(shape, value):
    """S-4: many prompts, and one."""
    lens = query_lens(MANY_QUERIES) if shape == "rows" else [MOST]
    ends = prefix_sums(lens).tolist()
    config = PrefillConfig(
        num_heads=16, softmax_scale=192**-0.5, max_rows=len(lens), max_tokens=MOST,
        v_head_dim=value,
    )  # fmt: skip
    prefill = Prefill(config)
    q, k = normal(MOST, 16, 192), normal(MOST, 16, 128, seed=2)
    k_pe, v = normal(MOST, P, seed=3), normal(MOST, 16, value, seed=4)

    def answers(begin, end):
        """Attend tokens `begin` to `end`, whole rows of many or a chunk of one."""
        if shape == "rows":
            first, last = ends.index(begin), ends.index(end)
            keys, starts = slice(begin, end), prefix_sums(lens[first:last])
            key_starts = starts
        else:
            keys, starts, key_starts = slice(0, end), prefix_sums([end - begin]), prefix_sums([end])
        prefill.plan(starts, key_starts, num_tokens=end - begin)
        mine = q[begin:end]
        return prefill.attend(mine[..., :128], mine[..., 128:], k[keys], k_pe[keys], v[keys])

    cuts = [0, ends[20], ends[40], MOST] if shape == "rows" else [0, PIECE, 2 * PIECE, MOST]
    pieces = [answers(begin, end) for begin, end in pairwise(cuts)]
    out, lse = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    for count in TOKENS:
        mine = answers(0, count)
        right = out[:count].float().flatten(1)
        error = (mine[0].float().flatten(1) - right).norm(dim=1) / right.norm(dim=1)
        assert error.max() < 1e-2
        torch.testing.assert_close(mine[1], lse[:count], rtol=0, atol=1e-3)


@pytest.mark.parametrize("absorbed_rows", [0, 1], ids=["materialized", "absorbed"])
def test_layer(absorbed_rows):
    """S-21: one row of as many queries, in one piece and in chunks."""
    attention = MlaConfig(
        num_heads=16, max_rows=2, max_query_tokens=MOST, max_model_len=MOST, **SIZES
    )
    layer = MlaLayer(LayerConfig(attention=attention, workspace_tokens=MOST))
    rows = Rows(attention, [(MOST, MOST)])
    cache = spoilt_cache(attention, rows.blocks)
    weights = HeadWeights(normal(16, 256, R) * R**-0.5, 128)
    q = normal(MOST, 16, 192, seed=5)

    def answers(begin, end):
        lengths = prefix_sums([end - begin]), torch.full_like(rows.seq_lens, end), rows.table
        host = {"query_lens": [end - begin], "max_seq_lens": [end]}
        layer.plan(MlaStep(*lengths, num_tokens=end - begin, **host), absorbed_rows=absorbed_rows)
        layer.append(rows.kv[begin:end, :R], rows.kv[begin:end, R:], cache)
        mine = q[begin:end]
        return layer.attend(mine[..., :128], mine[..., 128:], cache, weights)

    pieces = [answers(begin, end) for begin, end in pairwise([0, PIECE, 2 * PIECE, MOST])]
    out, lse = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    for count in TOKENS:
        mine = answers(0, count)
        right = out[:count].float().flatten(1)
        error = (mine[0].float().flatten(1) - right).norm(dim=1) / right.norm(dim=1)
        assert error.max() < 2e-2
        torch.testing.assert_close(mine[1], lse[:count], rtol=0, atol=1e-2)


@pytest.mark.parametrize(("rows", "window"), [(21845, 3), (16384, 4), (1, 65537), (MAX_ROWS, 3)])
def test_tokens_of_windows(rows, window):
    """S-16: windows that have together as many tokens, and as many rows as a step may have."""
    windows = ExtendWindow(rows, window, "cuda")
    committed = torch.arange(rows, dtype=torch.int32, device="cuda")
    windows.fill(committed)
    assert torch.equal(windows.seq_lens, torch.where(committed > 0, committed + window, 0))
    assert windows.cu_seqlens_q[-1] == rows * window


@pytest.mark.parametrize(("requests", "branches"), [(MAX_ROWS, 1), (MAX_ROWS // 4, 4)])
def test_rows_of_drafts(requests, branches):
    """S-15: rows and tails of as many branches as a step may have, in more than 65537 blocks."""
    rows = requests * branches
    drafts = DraftSteps(
        max_requests=requests, branches=branches, steps=2, prefix_width=1, own_width=8,
        block_size=BLOCK, device="cuda",
    )  # fmt: skip
    request = torch.arange(requests, dtype=torch.int32, device="cuda")
    prefix_lens, prefix_table = request % BLOCK, request[:, None].clone()
    own = requests + torch.arange(8 * rows, dtype=torch.int32, device="cuda")
    own = own.view(requests, branches, 8)
    drafts.fill(prefix_lens, prefix_table, own)
    step = torch.arange(1, 3, device="cuda")[:, None]
    lens = torch.where(prefix_lens > 0, prefix_lens + step, 0).int()
    assert torch.equal(drafts.seq_lens, lens.repeat_interleave(branches, dim=1))
    cache = torch.full((requests + 8 * rows, BLOCK, R + P), torch.nan, device="cuda").bfloat16()
    assert cache.numel() > 2**31
    cache[:requests] = normal(requests, BLOCK, R + P)
    drafts.copy_tails(cache, prefix_lens, prefix_table, own)
    live = torch.arange(BLOCK, device="cuda")[None] < prefix_lens[:, None]
    for branch in range(branches):
        tails = cache[own[:, branch, 0].long()]
        assert torch.equal(bits(tails[live]), bits(cache[:requests][live]))


@pytest.mark.parametrize("name", ["tile", "tile-exact", "portable"])
def test_a_mask_past_2_31(name):
    """S-6: rows whose lines begin past 2^31 bools have the bits that they have alone."""
    context, query_len, count = 32768, 64, 1040
    mla = instance(
        name, longest=query_len, max_rows=count, max_query_tokens=count * query_len,
        max_model_len=context + query_len, mask="tree:full", max_draft_tokens=query_len,
    )  # fmt: skip
    config, own = mla.config, query_len // BLOCK
    shared = context // BLOCK
    table = torch.arange(shared, dtype=torch.int32).expand(count, -1)
    tails = shared + torch.arange(count * own, dtype=torch.int32).view(count, own)
    table = torch.cat([table, tails], 1).cuda()
    cache = spoilt_cache(config, shared + count * own)
    latents_of(cache).copy_(
        normal(*latents_of(cache).shape) if not config.is_fp8
        else torch.randint(0, 120, latents_of(cache).shape, device="cuda", dtype=torch.uint8)
    )  # fmt: skip
    lines = (count * query_len, context + query_len)
    mask = torch.randint(0, 2, lines, device="cuda", dtype=torch.int8).bool()
    assert mask.numel() > 2**31
    q = normal(count * query_len, config.num_heads, R + P)
    lens = torch.full((count,), context + query_len, dtype=torch.int32, device="cuda")
    starts = prefix_sums([query_len] * count)
    mla.plan(MlaStep(starts, lens, table, num_tokens=len(q), mask=mask.flatten()))
    out, lse = mla.attend(q[..., :R], q[..., R:], cache)
    last_before = 2**31 // (query_len * lines[1])
    for row in (0, last_before - 1, last_before, last_before + 1, count - 1):
        mine = slice(row * query_len, (row + 1) * query_len)
        rows = slice(row, row + 1)
        alone = mask[mine].flatten()
        mla.plan(MlaStep(starts[:2], lens[rows], table[rows], num_tokens=query_len, mask=alone))
        answers = mla.attend(q[mine, :, :R], q[mine, :, R:], cache)
        assert same(answers[0], out[mine])
        assert same(answers[1], lse[mine])


@pytest.mark.parametrize("name", KERNELS)
def test_a_cache_past_2_33(name):
    """S-9: rows in the last blocks of a cache of more than 2^33 bytes and elements."""
    mla = instance(
        name, longest=1, max_rows=8, max_query_tokens=8, max_model_len=4096, block_size=64
    )
    config = mla.config
    small = spoilt_cache(config, 300)
    blocks = 2**33 // latents_of(small)[0].numel() + 300
    large = spoilt_cache(config, blocks)
    assert latents_of(large).numel() > 2**33
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int().view(4, 64).cuda()
    lens = torch.tensor([4096, 1, 700, 64], dtype=torch.int32, device="cuda")
    starts = prefix_sums([1, 1, 1, 1])
    kv, q = normal(4, R + P), normal(4, config.num_heads, R + P)
    contents = latents_of(small)
    contents.copy_(
        normal(*contents.shape) if contents.dtype == torch.bfloat16
        else torch.randint(0, 120, contents.shape, device="cuda", dtype=torch.uint8)
    )  # fmt: skip
    latents_of(large)[-300:] = contents
    answers = []
    for cache, table in ((small, order), (large, order + (blocks - 300))):
        mla.plan(MlaStep(starts, lens, table, num_tokens=4, max_query_len=1))
        mla.append(kv[:, :R], kv[:, R:], cache)
        out, lse = mla.attend(q[..., :R], q[..., R:], cache)
        gathered = torch.zeros(int(lens.sum()), R + P, dtype=torch.bfloat16, device="cuda")
        mla.gather_context(cache, gathered[:, :R], gathered[:, R:])
        answers.append((out, lse, gathered, latents_of(cache)[-300:]))
    for mine, right in zip(*answers, strict=True):
        assert same(mine, right)


def test_tails_in_a_cache_past_2_33():
    """S-15: branches own the last blocks of a cache of more than 2^33 elements."""
    blocks = 2**33 // (64 * (R + P)) + 8
    cache = torch.full((blocks, 64, R + P), torch.nan, dtype=torch.bfloat16, device="cuda")
    drafts = DraftSteps(
        max_requests=1, branches=2, steps=2, prefix_width=1, own_width=2, block_size=64,
        device="cuda",
    )  # fmt: skip
    lens = torch.tensor([50], dtype=torch.int32, device="cuda")
    prefix = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    own = torch.tensor([[[0, 1], [blocks - 3, blocks - 2]]], dtype=torch.int32, device="cuda")
    cache[-1] = normal(64, R + P)
    drafts.copy_tails(cache, lens, prefix, own)
    for block in (0, blocks - 3):
        assert same(cache[block, :50], cache[-1, :50])


@pytest.mark.parametrize("size", [480, 1056])
@pytest.mark.parametrize("name", KERNELS)
def test_large_blocks(name, size):
    """S-1: outputs for blocks of this size equal those for blocks of 16."""
    seq_lens = [1, 300, size - 1, size + 1, 2 * size + 5]
    kv = normal(sum(seq_lens), R + P)
    q = normal(len(seq_lens), KERNELS[name][2]["num_heads"], R + P, seed=2)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
    answers = []
    for block_size in (16, size):
        mla = instance(
            name, longest=1, max_rows=8, max_query_tokens=8192, max_model_len=4096,
            block_size=block_size,
        )  # fmt: skip
        width = -(-max(seq_lens) // block_size)
        table = torch.randperm(len(seq_lens) * width, device="cuda").int().view(-1, width)
        cache = spoilt_cache(mla.config, table.numel())
        mla.plan(MlaStep(prefix_sums(seq_lens), lens, table, num_tokens=len(kv)))
        mla.append(kv[:, :R], kv[:, R:], cache)
        starts = prefix_sums([1] * len(seq_lens))
        mla.plan(MlaStep(starts, lens, table, num_tokens=len(q), max_query_len=1))
        answers.append(mla.attend(q[..., :R], q[..., R:], cache))
    (out, lse), (right, right_lse) = answers
    error = (out - right).float().flatten(1).norm(dim=1) / right.float().flatten(1).norm(dim=1)
    assert error.max() < 1e-2
    torch.testing.assert_close(lse, right_lse, rtol=0, atol=1e-3)
