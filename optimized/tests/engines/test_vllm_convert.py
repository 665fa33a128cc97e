"""vLLM's conventions as pure functions, what is refused, and what a user may choose."""

from __future__ import annotations

import logging

import pytest
import torch

from paged_mla_optimized import LatentCache
from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.tensors import as_cache, split_queries
from paged_mla_optimized.engines.vllm import registration
from paged_mla_optimized.engines.vllm.convert import (
    cache_format,
    capacities,
    query_len,
)
from paged_mla_optimized.engines.vllm.options import Options, options_of
from paged_mla_optimized.engines.vllm.reasons import misfit, refuse_adapters, refuse_variance
from paged_mla_optimized.engines.vllm.versions import OLDEST, context_chunk
from paged_mla_shared.errors import InvalidArgument, Unsupported

HOPPER = (9, 0)
GOOD = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "capability": HOPPER,
}


@pytest.mark.parametrize(
    ("word", "dtype", "ours"),
    [
        ("auto", torch.bfloat16, "bf16"),
        ("auto", torch.float16, "fp16"),
        ("bfloat16", torch.bfloat16, "bf16"),
        ("fp8", torch.bfloat16, "fp8_e4m3"),
        ("fp8_e4m3", torch.float16, "fp8_e4m3"),
    ],
)
def test_words_for_a_cache(word, dtype, ours):
    assert cache_format(word, dtype) == ours


@pytest.mark.parametrize("word", ["fp8_ds_mla", "fp8_e5m2", "int8_per_token_head", "float16"])
def test_other_caches_are_refused(word):
    with pytest.raises(Unsupported, match=f"kv_cache_dtype={word} is not supported"):
        cache_format(word, torch.bfloat16)


@pytest.mark.parametrize("word", ["auto", "fp8"])
def test_models_of_other_dtypes_are_refused(word):
    with pytest.raises(Unsupported, match=r"dtype=torch\.float64 is not supported; use one of"):
        cache_format(word, torch.float64)


def test_graphs_may_have_more_rows_than_the_scheduler():
    """Rows that pad a graph count too; tokens are no more than the scheduler hands out."""
    sizes = {"max_num_seqs": 60, "max_num_batched_tokens": 200}
    assert capacities(**sizes, max_graph_tokens=64, longest=1) == (64, 64)
    assert capacities(**sizes, max_graph_tokens=0, longest=1) == (60, 60)
    assert capacities(**sizes, max_graph_tokens=64, longest=2) == (64, 128)
    assert capacities(**sizes, max_graph_tokens=64, longest=2048) == (64, 200)
    assert capacities(**sizes, max_graph_tokens=512, longest=4) == (512, 512)


@pytest.mark.parametrize(
    ("rows", "tokens", "length"),
    [
        (8, 8, 1),  # decode
        (8, 3, 1),  # rows that only pad
        (8, 32, 4),  # all rows with three drafts: a graph's shape
        (8, 9, 4),  # one row with a draft
        (8, 33, 512),  # a short prompt among them
        (1, 2000, 512),
        (0, 0, 1),
    ],
)
def test_kernels_are_chosen_by_padded_counts(rows, tokens, length):
    assert query_len(rows, tokens, (1, 4, 512)) == length


def test_queries_come_apart_or_together():
    q = torch.arange(2 * 3 * 6.0).view(2, 3, 6)
    pair = q[..., :4], q[..., 4:]
    assert split_queries(pair, 4) is pair
    for mine, theirs in zip(split_queries(q, 4), pair, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.data_ptr() == theirs.data_ptr()  # no copy


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_layers_scale_counts_for_fp8_alone(shape):
    scale = torch.full(shape, 0.5)
    latents = torch.zeros(2, 4, 8).to(torch.float8_e4m3fn)
    cache = as_cache("fp8_e4m3", latents, scale)
    assert isinstance(cache, LatentCache)
    assert cache.scales.shape == ()
    assert cache.scales.data_ptr() == scale.data_ptr()  # read where it lies, as vLLM renews it
    assert as_cache("bf16", latents, scale) is latents


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (7, 5)}, "compute capability 7.5"),
        ({"dtype": torch.float32}, "float32"),
        (
            {"head_size": 512},
            "head_size=512 is not supported; use a model with head_size 320 or 576",
        ),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype=fp8_ds_mla is not supported"),
        (
            {"kv_cache_dtype": "float16"},
            "kv_cache_dtype=float16 is not supported for a model of dtype torch.bfloat16",
        ),
    ],
)
def test_unsupported_models_have_a_reason(change, reason):
    assert reason in (misfit(**(GOOD | change)) or "")


@pytest.mark.parametrize("word", [None, "auto", "fp8", "bfloat16"])
def test_supported_models_have_no_reason(word):
    assert misfit(**(GOOD | {"kv_cache_dtype": word})) is None


def test_options_of_a_user():
    assert options_of({}) == options_of(None) == options_of({"others": 1}) == Options()
    chosen = {"absorbed_query_len": 128, "products": "fast"}
    assert options_of({"paged_mla": chosen}) == Options(absorbed_query_len=128, products="fast")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"product": "fast"},
            "paged_mla.product: got fast; allowed: only the options absorbed_query_len, products",
        ),
        ({"products": "quick"}, "paged_mla.products: got 'quick'"),
        ({"absorbed_query_len": 0}, "paged_mla.absorbed_query_len: got 0"),
        ({"absorbed_query_len": "9"}, "paged_mla.absorbed_query_len: got '9'"),
        ({"absorbed_query_len": True}, "paged_mla.absorbed_query_len: got True"),
        ({"products": None}, "paged_mla.products: got None"),
        (None, "paged_mla: got None; allowed: a Mapping"),
        ("fast", "paged_mla: got a str; allowed: a Mapping"),
        (["products", "fast"], "paged_mla: got a list; allowed: a Mapping"),
    ],
)
def test_wrong_options_are_named(given, named):
    with pytest.raises(InvalidArgument) as raised:
        options_of({"paged_mla": given})
    assert named in str(raised.value)


@pytest.mark.parametrize(
    "version", ["0.25.0", "0.33.1+cu130", "1.0", "0.40.0.dev3", "0.1.dev1+g3", "dev"]
)
def test_releases_that_are_served(version):
    assert serves(version, OLDEST)


def test_an_old_release_gets_a_warning_and_no_backend(monkeypatch, caplog):
    """An exception here would end vLLM for people who chose another backend."""
    monkeypatch.setattr(registration, "version", lambda _: "0.24.3")
    with caplog.at_level(logging.WARNING, logger="paged_mla"):
        registration.register()
    assert "0.24.3" in caplog.text


class _Named:
    def __init__(self, **names):
        self.__dict__.update(names)


def test_chunks_of_either_release():
    """0.25 numbers chunks of all rows; 0.33 hands over one, of some rows."""
    starts, keys = torch.tensor([0, 3]), [torch.tensor([0, 8]), torch.tensor([0, 5])]
    metadata = _Named(query_start_loc=starts, chunked_context=_Named(cu_seq_lens=keys))
    for number in (0, 1):  # told apart: each is planned by itself
        assert context_chunk(metadata, number, None) == (number, starts, keys[number])
    chunk = _Named(index=0, query_start_loc=torch.tensor([0, 2]), cu_seq_lens=keys[0])
    new = context_chunk(metadata, None, chunk)
    assert new == (0, chunk.query_start_loc, keys[0])


def test_rows_of_several_tokens_are_refused_where_the_batch_decides_their_way():
    refuse_variance(Options(products="fast"))
    with pytest.raises(Unsupported, match=r"paged_mla\.absorbed_query_len=2 is not supported"):
        refuse_variance(Options(absorbed_query_len=2))


class _WithLora:
    """A projection as vLLM wraps it where LoRA is enabled."""

    def __init__(self):
        self.lora_b_stacked = (torch.zeros(2, 1, 8, 4),)

    def set_lora(self, index, lora_a, lora_b):
        assert lora_a.shape == (4, 8)
        self.lora_b_stacked[0][index, 0] = lora_b


def test_an_adapter_of_kv_b_proj_is_refused_when_it_is_set():
    """vLLM would load it and apply it nowhere; what it warms up with is of zeros."""
    layer, plain = _Named(kv_b_proj=_WithLora()), _Named(kv_b_proj=_Named())
    for _ in range(2):  # each group of layers has a builder
        refuse_adapters([plain, layer, _Named()])
    lora_a = torch.ones(4, 8)
    layer.kv_b_proj.set_lora(0, lora_a, torch.zeros(8, 4))
    for adapter in (torch.ones(8, 4), [None, torch.ones(8, 4)]):
        with pytest.raises(Unsupported, match="a LoRA adapter of kv_b_proj is not supported"):
            layer.kv_b_proj.set_lora(1, lora_a, adapter)
    assert not layer.kv_b_proj.lora_b_stacked[0].any()


def test_an_existing_adapter_of_kv_b_proj_is_rejected():
    projection = _WithLora()
    projection.set_lora(1, torch.ones(4, 8), torch.ones(8, 4))
    with pytest.raises(Unsupported, match="a LoRA adapter of kv_b_proj"):
        refuse_adapters([_Named(kv_b_proj=projection)])
