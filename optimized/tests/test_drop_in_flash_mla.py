"""Dense decode by FlashMLA's names gives what attention in float64 gives (S-4 to S-7)."""

import copy
from threading import Thread

import numpy as np
import pytest
import torch

from paged_mla_optimized.drop_in.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from paged_mla_shared.errors import InvalidArgument, Unsupported

R, P, PAGE = 32, 16, 16
POISON = 2_147_480_000  # in table entries past a row's last page, as in FlashMLA's own test


def step(seq_lens=(0, 2, 20, 33), *, query_len=2, heads=16, kv_heads=1, dtype=torch.float16):
    """Return the arguments of a call, its cache NaN where no row has a token."""
    generator = torch.Generator().manual_seed(len(seq_lens))
    rows, pages = len(seq_lens), -(-max(seq_lens, default=0) // PAGE)
    q = torch.randn(rows, query_len, heads, R + P, generator=generator).to(dtype)
    table = torch.randperm(rows * pages, generator=generator).view(rows, pages).int()
    cache = torch.randn(rows * pages, PAGE, kv_heads, R + P, generator=generator).to(dtype)
    for row, seq_len in enumerate(seq_lens):
        past = torch.arange(pages * PAGE).view(pages, PAGE) >= seq_len
        cache[table[row].long()[:, None].expand_as(past)[past], past.nonzero()[:, 1]] = torch.nan
        table[row, -(-seq_len // PAGE) :] = POISON
    return {
        "q": q,
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": torch.tensor(seq_lens, dtype=torch.int32),
        "head_dim_v": R,
    }


def call(arguments, **options):
    metadata, num_splits = get_mla_metadata()
    asked = {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    return flash_mla_with_kvcache(**(arguments | asked | options))


def expected(arguments, *, causal=False, softmax_scale=(R + P) ** -0.5):
    """Attend in float64, row by row."""
    q, cache = arguments["q"].double(), arguments["k_cache"].double()
    rows, query_len, heads, _ = q.shape
    out = torch.zeros(rows, query_len, heads, R, dtype=torch.float64)
    lse = torch.full((rows, heads, query_len), torch.inf, dtype=torch.float64)
    for row, seq_len in enumerate(arguments["cache_seqlens"].tolist()):
        used = arguments["block_table"][row, : -(-seq_len // PAGE)].long()
        keys = cache[used].flatten(0, 1)[:seq_len]  # [seq_len, H_kv, R + P]
        keys = keys.repeat_interleave(heads // keys.shape[1], 1)
        for query in range(query_len):
            seen = keys[: max(seq_len - query_len + query + 1, 0)] if causal else keys
            if len(seen):
                scores = softmax_scale * torch.einsum("hd,khd->hk", q[row, query], seen)
                lse[row, :, query] = scores.logsumexp(-1)
                weights = scores.softmax(-1)
                out[row, query] = torch.einsum("hk,khd->hd", weights, seen[..., :R])
    return out, lse


def assert_answers(answer, wanted):
    for tensor, right in zip(answer, wanted, strict=True):
        assert tensor.shape == right.shape
        assert tensor.is_contiguous()
        torch.testing.assert_close(tensor.double(), right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("query_len", "kv_heads", "causal"),
    [(1, 1, False), (1, 2, True), (4, 1, True), (4, 2, False), (3, 2, True)],
)
def test_answers_are_those_of_dense_attention(query_len, kv_heads, causal):
    """S-4 to S-7: rows without keys, and with fewer than queries, whichever the mask."""
    arguments = step(query_len=query_len, kv_heads=kv_heads)
    answer = call(arguments, causal=causal)
    assert_answers(answer, expected(arguments, causal=causal))
    assert answer[0].dtype == torch.float16
    assert answer[1].dtype == torch.float32


def test_a_scale_of_the_model():
    arguments = step()
    assert_answers(call(arguments, softmax_scale=0.3), expected(arguments, softmax_scale=0.3))


def test_queries_and_pages_may_be_slices():
    arguments = step(kv_heads=2)
    q, cache = arguments["q"], arguments["k_cache"]
    wide = torch.full((*q.shape[:2], 2 * q.shape[2], R + P), torch.nan).half()
    apart = torch.full((2 * len(cache), *cache.shape[1:]), torch.nan).half()
    wide[:, :, ::2], apart[::2] = q, cache
    arguments |= {"q": wide[:, :, ::2], "k_cache": apart[::2]}
    assert_answers(call(arguments), expected(arguments))


@pytest.mark.parametrize("causal", [False, True])
def test_layers_of_a_step_share_its_metadata(causal):
    """Each layer has its own cache, table and scale; the lengths are those of the first call."""
    metadata, _ = get_mla_metadata()
    for layer in range(2):
        arguments = step()
        order = torch.randperm(len(arguments["k_cache"]))
        arguments["k_cache"] = arguments["k_cache"][order]
        table = arguments["block_table"]
        is_used = table < POISON
        table[is_used] = order.argsort()[table[is_used].long()].int()
        options = {"softmax_scale": 0.1 + 0.1 * layer, "causal": causal}
        answer = call(arguments, tile_scheduler_metadata=metadata, **options)
        assert_answers(answer, expected(arguments, **options))


@pytest.mark.parametrize(
    "other", [{"query_len": 1}, {"seq_lens": (5,)}, {"heads": 8}, {"kv_heads": 2}]
)
def test_metadata_of_another_step_is_refused(other):
    metadata, _ = get_mla_metadata()
    call(step(), tile_scheduler_metadata=metadata)
    with pytest.raises(InvalidArgument, match=r"^tile_scheduler_metadata: .*get_mla_metadata"):
        call(step(**other), tile_scheduler_metadata=metadata)
    with pytest.raises(InvalidArgument, match="tile_scheduler_metadata"):
        call(step(), tile_scheduler_metadata=metadata, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(3, 2), (2, 3)])
def test_metadata_of_a_table_of_another_width_is_refused(causal, widths):
    """A length that the first table holds is past the end of a narrower one, and the reverse."""
    metadata, _ = get_mla_metadata()
    options = {"tile_scheduler_metadata": metadata, "causal": causal}
    first, second = (
        step() | {"block_table": step()["block_table"][:, :width].contiguous()} for width in widths
    )
    call(first, **options)
    with pytest.raises(InvalidArgument, match=r"^tile_scheduler_metadata: .*get_mla_metadata"):
        call(second, **options)
    call(first, **options)


def test_metadata_is_not_copied():
    with pytest.raises(Unsupported, match="FlashMLASchedMeta"):
        copy.deepcopy(get_mla_metadata()[0])


def test_lengths_other_than_the_planned_ones_are_found_where_steps_are_checked(monkeypatch):
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    arguments = step(kv_heads=2, query_len=3)
    metadata, _ = get_mla_metadata()
    # A scale of its own gives it buffers of its own, made with the variable set.
    options = {"tile_scheduler_metadata": metadata, "softmax_scale": 0.17, "causal": True}
    for _ in range(2):
        wanted = expected(arguments, causal=True, softmax_scale=0.17)
        assert_answers(call(arguments, **options), wanted)
    arguments["cache_seqlens"] = arguments["cache_seqlens"] - 1
    with pytest.raises(InvalidArgument, match=r"cache_seqlens: got \[-1, 1, 19, 32\]"):
        call(arguments, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("cache_seqlens", (0,), -1, r"^cache_seqlens: got -1 in row 0"),
        ("cache_seqlens", (3,), 1000, r"^block_table: got 3 columns.* 1000 tokens of row 3$"),
        ("block_table", (3, 1), 12, r"^block_table: got block 12 in row 3, column 1.* 0 to 11$"),
        ("block_table", (2, 0), -5, r"^block_table: got block -5 in row 2, column 0"),
    ],
)
def test_values_are_named_as_the_caller_knows_them_where_steps_are_checked(
    monkeypatch, causal, name, at, value, message
):
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    arguments = step()
    metadata, _ = get_mla_metadata()
    options = {"tile_scheduler_metadata": metadata, "softmax_scale": 0.18, "causal": causal}
    arguments[name][at], kept = value, int(arguments[name][at])
    with pytest.raises(InvalidArgument, match=message):
        call(arguments, **options)
    arguments[name][at] = kept
    call(arguments, **options)
    arguments["block_table"][3, 2] = -7
    with pytest.raises(InvalidArgument, match=r"block -7 in row 3, column 2"):
        call(arguments, **options)  # a later call reads a table of its own


def test_lengths_that_no_row_has_see_nothing():
    arguments = step()
    arguments["cache_seqlens"] = torch.tensor([-1, 1000, 20, -(2**31)], dtype=torch.int32)
    counted = arguments | {"cache_seqlens": torch.tensor([0, 0, 20, 0])}
    for causal in (False, True):
        assert_answers(call(arguments, causal=causal), expected(counted, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_steps_without_queries(causal):
    for seq_lens, query_len in (((), 2), ((5, 5, 5), 0)):
        out, lse = call(step(seq_lens, query_len=query_len), causal=causal)
        assert out.shape == (len(seq_lens), query_len, 16, R)
        assert lse.shape == (len(seq_lens), 16, query_len)


@pytest.mark.parametrize("causal", [False, True])
def test_a_table_without_columns_and_a_cache_without_pages(causal):
    arguments = step((0, 0))
    assert_answers(call(arguments, causal=causal), expected(arguments, causal=causal))


def test_metadata_and_buffers_of_inference_mode_serve_outside_of_it():
    arguments, metadata = step(), get_mla_metadata()[0]
    options = {"tile_scheduler_metadata": metadata, "softmax_scale": 0.19}
    with torch.inference_mode():
        call(arguments, **options)
    assert_answers(call(arguments, **options), expected(arguments, softmax_scale=0.19))
    assert_answers(call(arguments, softmax_scale=0.19), expected(arguments, softmax_scale=0.19))


def test_a_compiled_function_has_a_graph_break():
    arguments = step()

    @torch.compile(backend="eager")
    def layer(arguments):
        out, lse = call(arguments, causal=True)
        return out + 1, lse

    out, lse = layer(arguments)
    assert_answers((out - 1, lse), expected(arguments, causal=True))


def test_threads_run_one_after_another():
    arguments = step((40, 7), query_len=3)
    answers = []
    threads = [Thread(target=lambda: answers.append(call(arguments))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        assert_answers(answer, expected(arguments))
    assert len(answers) == 3


@pytest.mark.parametrize(
    "option",
    [
        {"is_fp8_kvcache": True},
        *(
            {name: torch.zeros(1)}
            for name in ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache")
        ),
        {"is_fp8_kvcache": np.True_},
        {"indices": False},
        {"topk_length": torch.zeros(1)},
        {"extra_topk_length": torch.zeros(1)},
    ],
)
def test_what_no_kernel_serves_is_refused(option):
    with pytest.raises(Unsupported, match=next(iter(option))):
        call(step(), **option)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim_v": R + P}, "head_dim_v 48 with head_dim 48"),
        ({"head_dim_v": -1}, "head_dim_v -1"),
        (
            {"q": torch.zeros(4, 2, 129, R + P).half()},
            "129 heads is not supported for a k_cache of 1 heads",
        ),
        ({"q": torch.zeros(4, 2, 16, R + P).double()}, "q of torch.float64"),
        (step(dtype=torch.bfloat16), "bfloat16"),  # in the interpreter
    ],
)
def test_sizes_that_no_kernel_serves_are_refused(changes, message):
    with pytest.raises(Unsupported, match=message):
        call(step() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 2, R + P).half()}, r"^q: got shape"),
        ({"q": None}, "^q: got None"),
        ({"k_cache": torch.zeros(2, PAGE, R + P).half()}, r"^k_cache: got shape"),
        ({"k_cache": torch.zeros(2, PAGE, 1, R).half()}, r"^k_cache: got shape"),
        ({"k_cache": torch.zeros(2, PAGE, 1, R + P)}, r"^k_cache: got torch.float32"),
        ({"k_cache": torch.zeros(2, PAGE, 3, R + P).half()}, "^q: got 16 heads"),
        ({"k_cache": torch.zeros(2, PAGE, 0, R + P).half()}, "^q: got 16 heads"),
        ({"k_cache": torch.zeros(2, 0, 1, R + P).half()}, "^page_block_size of k_cache: got 0"),
        ({"k_cache": torch.zeros(2, PAGE, 1, R + P, device="meta").half()}, "^k_cache: got on"),
        ({"block_table": None}, "^block_table: got None"),
        ({"block_table": torch.zeros(4, 1).long()}, "^block_table: got torch.int64"),
        ({"block_table": torch.zeros(3, 1).int()}, "^block_table: got shape"),
        ({"cache_seqlens": None}, "^cache_seqlens: got None"),
        ({"cache_seqlens": torch.zeros(4).long()}, "^cache_seqlens: got torch.int64"),
        ({"cache_seqlens": torch.zeros(5).int()}, "^cache_seqlens: got shape"),
        ({"head_dim_v": 32.0}, "^head_dim_v: got 32.0"),
        ({"softmax_scale": True}, "^softmax_scale: got True"),
        ({"softmax_scale": float("nan")}, "^softmax_scale: got nan"),
        ({"causal": 1}, "^causal: got 1"),
        ({"is_fp8_kvcache": 0}, "^is_fp8_kvcache: got 0; allowed: True or False"),
        ({"is_fp8_kvcache": None}, "^is_fp8_kvcache: got None"),
        ({"num_splits": torch.zeros(2)}, "^num_splits: got a value"),
        ({"tile_scheduler_metadata": torch.zeros(2)}, "^tile_scheduler_metadata: got a Tensor"),
        ({"q": torch.zeros(1, 2, 16, R + P).half().expand(20_000, -1, -1, -1)}, "^batch_size"),
    ],
)
def test_arguments_that_nothing_could_accept_are_named(changes, message):
    options = {"causal": True}
    with pytest.raises(InvalidArgument, match=message):
        call(step(), **(options | changes))


def test_arguments_of_older_releases_are_taken():
    """They computed the metadata from lengths, heads and the number of key heads."""
    metadata, num_splits = get_mla_metadata(torch.zeros(4).int(), 32, 1, num_heads_q=16)
    assert isinstance(metadata, FlashMLASchedMeta)
    assert num_splits is None


def test_the_default_scale_is_not_warned_of():
    """S-5: that of FlashMLA, the width of queries, here at DeepSeek's sizes."""
    q, cache = torch.zeros(1, 1, 16, 576), torch.zeros(1, 64, 1, 576)
    lens, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(q, cache, table, lens, 512, *get_mla_metadata())
    assert not out.any()
    assert lse.isinf().all()
