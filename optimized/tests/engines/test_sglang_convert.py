"""SGLang's conventions as pure functions, and what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from paged_mla_optimized.engines.fits import misfit
from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.sglang import registration
from paged_mla_optimized.engines.sglang.convert import (
    as_blocks,
    cache_format,
    capacities,
    own_masks,
    starts_of,
)
from paged_mla_optimized.engines.sglang.reasons import (
    common_scaling,
    refuse_extras,
    refuse_variance,
)
from paged_mla_optimized.engines.sglang.versions import OLDEST, moves_tokens, with_ours
from paged_mla_shared.errors import Unsupported


def test_types_of_a_pool():
    assert cache_format(torch.bfloat16, torch.bfloat16) == "bf16"
    assert cache_format(torch.float16, torch.float16) == "fp16"
    assert cache_format(torch.float8_e4m3fn, torch.bfloat16) == "fp8_e4m3"


@pytest.mark.parametrize("stored", [torch.float8_e5m2, torch.float16, torch.uint8])
def test_other_pools_are_refused(stored):
    with pytest.raises(Unsupported, match=f"kv_cache_dtype={stored} is not supported"):
        cache_format(stored, torch.bfloat16)


@pytest.mark.parametrize("stored", [torch.float64, torch.float8_e4m3fn])
def test_models_of_other_dtypes_are_refused(stored):
    with pytest.raises(Unsupported, match=r"dtype=torch\.float64 is not supported by paged_mla"):
        cache_format(stored, torch.float64)


def largest(**changes):
    """Rows and tokens of a server's largest step."""
    plain = {
        "max_requests": 64,
        "rank_multiple": 1,
        "chunked_prefill_size": 2048,
        "chunks_grow": False,
        "graph_tokens": 0,
        "max_prefill_tokens": 16384,
        "context_len": 40000,
        "query_len": 1,
    }
    return capacities(**plain | changes)


@pytest.mark.parametrize(
    ("chunk", "query_len", "tokens"),
    [
        (2048, 1, 2048 + 64),  # a chunk and every running row beside it
        (2048, 4, 2048 + 256),
        (-1, 1, 40000 + 64),  # a prompt as long as the context
        (None, 1, 40000 + 64),
        (100_000, 1, 40000 + 64),
    ],
)
def test_the_largest_step(chunk, query_len, tokens):
    found = largest(chunked_prefill_size=chunk, query_len=query_len)
    assert found == (64, tokens)


@pytest.mark.parametrize(
    ("chunk", "prompts"),
    [
        (2048, 16384),  # the scheduler's own limit
        (16384, 20480),  # a quarter more, which it tries before it serves
        (100_000, 40000),
        (-1, 40000),
    ],
)
def test_chunks_that_grow(chunk, prompts):
    """Of dynamic chunking in pipelines: a scheduler chooses them by what is cached."""
    rows, tokens = largest(chunked_prefill_size=chunk, chunks_grow=True)
    assert (rows, tokens) == (64, prompts + 64)


@pytest.mark.parametrize(("graph_tokens", "prompts"), [(1024, 1024), (256, 512), (0, 512)])
def test_graphs_that_are_larger_than_a_chunk(graph_tokens, prompts):
    """S-17: graphs are captured at their own size, which the scheduler may not reach."""
    rows, tokens = largest(chunked_prefill_size=512, graph_tokens=graph_tokens)
    assert (rows, tokens) == (64, prompts + 64)


@pytest.mark.parametrize(("requests", "rows"), [(5, 8), (8, 8), (1, 4)])
def test_rows_that_ranks_share_are_rounded_up(requests, rows):
    """S-6: eager steps of data parallelism are padded to a multiple of the number of ranks."""
    found = largest(max_requests=requests, rank_multiple=4, query_len=3)
    assert found == (rows, 2048 + rows * 3)


def test_a_pool_is_viewed_as_blocks_without_a_copy():
    pool = torch.arange(32 * 6.0).view(32, 1, 6)
    blocks = as_blocks(pool, 16)
    assert blocks.shape == (2, 16, 6)
    assert blocks.data_ptr() == pool.data_ptr()
    assert torch.equal(blocks[1, 3], pool[19, 0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prefix_sums(dtype):
    starts = starts_of(torch.tensor([3, 0, 2], dtype=dtype))
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_without_their_context(dtype):
    """S-14: the last row only pads, and SGLang's mask ends before it."""
    trees = torch.randint(0, 2, (2, 3, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    full = [
        torch.cat([torch.ones(3, prefix, dtype=dtype), tree], dim=1).flatten()
        for prefix, tree in zip((5, 0), trees, strict=True)
    ]
    found = own_masks(torch.cat(full), torch.tensor([5, 0, 1]), 3)
    assert found.dtype == torch.bool
    assert found.shape == (27,)
    assert torch.equal(found[:18], trees.bool().flatten())


@pytest.mark.parametrize("prefix_lens", [[-9, 4], [2**31 - 1, 4], [-(2**31), -5]])
def test_masks_of_lengths_that_no_row_has(prefix_lens):
    """S-9: what such lengths point to outside the mask is not read."""
    lens = torch.tensor(prefix_lens, dtype=torch.int32)
    assert own_masks(torch.ones(30, dtype=torch.bool), lens, 3).shape == (18,)


def layer(**changes):
    plain = {
        "scaling": 0.1,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "attn_type": SimpleNamespace(value="decoder"),
    }
    return SimpleNamespace(**(plain | changes))


def test_a_scale_that_all_layers_have():
    assert common_scaling([layer(), layer()]) == 0.1


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "without layers over latents"),
        ([layer(), layer(scaling=0.2)], r"scaling, \[0.1, 0.2\]"),
        ([layer(logit_cap=30.0)], "logit_cap=30"),
        ([layer(sliding_window_size=128)], "sliding_window_size=128 is not supported"),
        ([layer(attn_type=SimpleNamespace(value="encoder_only"))], "encoder_only"),
    ],
)
def test_other_layers_are_refused(layers, reason):
    with pytest.raises(Unsupported, match=reason):
        common_scaling(layers)


def test_extra_arguments_of_layers_are_rejected():
    refuse_extras({"sinks": None})
    with pytest.raises(Unsupported, match="topk_indices"):
        refuse_extras({"sinks": None, "topk_indices": torch.zeros(1)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (7, 5)}, "compute capability 7.5"),
        ({"dtype": torch.float32}, "float32"),
        (
            {"head_size": 512},
            "head_size=512 is not supported; use a model with head_size 320 or 576",
        ),
        ({}, ""),
    ],
)
def test_models_and_devices(change, reason):
    good = {"head_size": 576, "dtype": torch.bfloat16, "capability": (9, 0)}
    assert reason in (misfit(**(good | change)) or "")


def test_pools_that_move_tokens():
    """The maps of these pools contain other numbers than slots."""
    plain, moving = SimpleNamespace(), SimpleNamespace(translate_kv_loc=len)
    assert not moves_tokens(SimpleNamespace(token_to_kv_pool_allocator=plain))
    assert moves_tokens(SimpleNamespace(token_to_kv_pool_allocator=moving))
    for moves in (False, True):
        translator = SimpleNamespace(reads_are_translated=moves)
        assert moves_tokens(SimpleNamespace(kv_index_translator=translator)) == moves


def test_a_draft_s_backend_in_either_form():
    def old(backend_name, backend_map, error_template):
        pass

    def new(backend_name, backend_map, error_template, stamps_children):
        pass

    steps, ours, others = [SimpleNamespace()], SimpleNamespace(), SimpleNamespace()
    ours.attn_backends = steps
    makers = with_ours(old, {"triton": lambda: others}, "ours", lambda: ours)
    assert (makers["ours"](), makers["triton"]()) == (ours, others)
    for backend, name in ((ours, "ours"), (steps[0], "ours"), (others, "triton")):
        assert backend.decode_attention_backend_str == name
        assert backend.prefill_attention_backend_str == name
    makers = with_ours(new, {"triton": lambda: ("triton", others)}, "ours", lambda: ours)
    assert (makers["ours"](), makers["triton"]()) == (("ours", ours), ("triton", others))


@pytest.mark.parametrize(
    "version", ["0.5.17", "0.5.23.post1", "0.6.0", "1.0", "0.5.24rc1", "0.1.dev1+g3", "dev"]
)
def test_releases_that_are_served(version):
    assert serves(version, OLDEST)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.16rc1", "0.5.9.post1"])
def test_an_old_release_gets_a_warning_and_no_backend(monkeypatch, caplog, version):
    monkeypatch.setattr(registration, "version", lambda _: version)
    with caplog.at_level(logging.WARNING, logger="paged_mla"):
        registration.register()
    assert f"SGLang {version} is installed" in caplog.text


@pytest.mark.parametrize("chunk", [None, -1])
def test_whole_prompts_that_nothing_caches_keep_their_bits(chunk):
    refuse_variance(has_radix_cache=False, chunked_prefill_size=chunk)


@pytest.mark.parametrize(
    ("has_radix_cache", "chunk", "reason"),
    [(True, -1, "set disable_radix_cache=True"), (False, 64, "chunked_prefill_size=64 .* to -1")],
)
def test_options_that_split_prompts_are_rejected(has_radix_cache, chunk, reason):
    with pytest.raises(Unsupported, match=reason):
        refuse_variance(has_radix_cache=has_radix_cache, chunked_prefill_size=chunk)
