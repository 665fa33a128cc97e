"""A warm instance has launched all that its steps launch, and has touched nothing."""

from collections.abc import Iterable
from contextlib import contextmanager

import pytest
import torch
from fp8_step import build_fp8
from mla_step import build
from test_layer import attend, layer_config, lens_of, plan, queries_of, weights_of

from paged_mla_optimized import (
    HeadWeights,
    LatentCache,
    LayerConfig,
    MlaConfig,
    MlaLayer,
    PagedMla,
    Prefill,
    PrefillConfig,
    RequestMap,
)
from paged_mla_optimized.api import core, prefill
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing

TREES = ("tree:qlen", "tree:full", "tree:packed")
CONFIGS = {
    "h16": {"num_heads": 16},
    "h128": {"num_heads": 128},
    "h32-fixed": {"num_heads": 32, "batch_invariant": True},
    "h20-float32": {"num_heads": 20, "dtype": torch.float32, "cache_format": "fp32"},
    "h16-rope": {"num_heads": 16, "rope": Rope(RopePairing.INTERLEAVED)},
    "h128-rope-base-2": {"num_heads": 128, "rope": Rope(RopePairing.NEOX), "lse_base": "2"},
    **{
        f"h{heads}-{name}-{products}": {
            "num_heads": heads,
            "cache_format": name,
            "products": products,
        }
        for name, heads, products in [
            ("fp8_e4m3", 128, "fast"),
            ("fp8_e4m3", 128, "exact"),
            ("fp8_ds_mla", 16, "exact"),
            ("fp8_block_token", 64, "fast"),
            ("fp8_block_group", 16, "exact"),
        ]
    },
    **{f"h16-{mask}": {"num_heads": 16, "mask": mask, "max_draft_tokens": 16} for mask in TREES},
}
STEPS = [(1, 1, 1), (7, 7, None), (200, 600, None), (40, 700, 64), (1, 1024, None), (3, 6, 2)]
"""Rows, tokens, and the longest query that the host knows of."""


@pytest.fixture
def launched(monkeypatch):
    """Simulate a Hopper GPU, and record kernels instead of launching them."""
    for module in (core, prefill):
        monkeypatch.setattr(module, "device_facts", lambda _device: DeviceFacts("sm90", 132))
    found = []

    def note(self, _grid, key, *_rest):
        found.append((self, special(key)))

    monkeypatch.setattr(Launcher, "__call__", note)
    return found


@contextmanager
def only_what_is_warm(launched):
    """Hold what is launched from now on against what was launched so far."""
    warm = set(launched)
    launched.clear()
    yield
    assert launched
    assert set(launched) <= warm


def special(key):
    """Return what of a key Triton compiles for: numbers of 1, and multiples of 16."""
    if isinstance(key, Iterable):
        return tuple(map(special, key))
    if not isinstance(key, int):
        return key
    return "1" if key == 1 else "16" if key % 16 == 0 else "any"


def small(**changes):
    """Return a config of 8 rows and 64 tokens in float16."""
    sizes = {"block_size": 64, "max_rows": 8, "max_query_tokens": 64, "max_model_len": 4096}
    numbers = {"num_heads": 16, "softmax_scale": 0.1, "dtype": torch.float16}
    return MlaConfig(**sizes | numbers | {"cache_format": "fp16"} | changes)


def cache_of(config):
    width = config.stored.row(config)[1]
    if not config.is_fp8:
        return torch.zeros(4, config.block_size, width, dtype=config.dtype)
    latents = torch.zeros(4, config.block_size, width, dtype=torch.uint8)
    shape = config.stored.scale_shape(4, config.block_size)
    scales = None if shape is None else torch.ones(shape)
    return LatentCache(config.cache_format, latents, scales)


def run(mla, cache, num_rows, num_tokens, max_query_len, request_map):
    """Run a step with slots of the plan, and with named ones; values do not matter here."""
    config = mla.config
    table = torch.zeros(num_rows, 5, dtype=torch.int32)
    if request_map is not None:
        ids = torch.zeros(num_rows, dtype=torch.int64)
        table = RequestMap(request_map.req_to_token, ids)
    mask = None
    if config.mask == "tree:packed":
        mask = torch.zeros(num_tokens, 2, dtype=torch.uint8)
    elif config.is_tree:
        mask = torch.zeros(999, dtype=torch.bool)
    lengths = torch.zeros(num_rows + 1, dtype=torch.int32)
    q_nope, q_pe, ckv, k_pe = (
        torch.zeros(num_tokens, *shape, dtype=config.dtype)
        for shape in ((config.num_heads, 512), (config.num_heads, 64), (512,), (64,))
    )
    mla.plan(
        MlaStep(
            lengths,
            lengths[:-1],
            table,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            mask=mask,
        )
    )
    mla.append(ckv, k_pe, cache)
    mla.append(ckv, k_pe, cache, torch.zeros(num_tokens, dtype=torch.int64))
    mla.attend(q_nope, q_pe, cache)
    mla.gather_context(cache, ckv, k_pe)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["tables", "request-map"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_step_launches_another_kernel(launched, name, is_mapped):
    """All kernels, and all strides that Triton compiles for."""
    defaults = {"softmax_scale": 0.1, "block_size": 64, "max_rows": 256, "max_model_len": 4096}
    sizes = {"max_query_tokens": 1024, "table_multiple": 8 if is_mapped else 0}
    config = MlaConfig(**defaults | sizes | CONFIGS[name])
    mla, cache = PagedMla(config, "cpu"), cache_of(config)
    request_map = RequestMap(
        torch.zeros(9, 4096, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    )
    mla.warm_up(cache, request_map if is_mapped else None)
    with only_what_is_warm(launched):
        for step in STEPS:
            run(mla, cache, *step, request_map if is_mapped else None)


@pytest.mark.parametrize("max_model_len", [4096, 100], ids=["one-row", "several"])
@pytest.mark.parametrize("absorbed", [0, 1, 2, 3])
def test_no_step_of_a_layer_launches_another_kernel(launched, absorbed, max_model_len):
    """S-21: materialized rows too, in one part of their keys and in several."""
    attention = small(max_model_len=max_model_len)
    layer = MlaLayer(LayerConfig(attention=attention, workspace_tokens=128), "cpu")
    cache, by_head = cache_of(attention), torch.zeros(16, 128 + 128, 512, dtype=torch.float16)
    weights = HeadWeights(by_head, 128)
    layer.warm_up(cache, weights)
    with only_what_is_warm(launched):
        query_lens, seq_lens = [1, 4, 20], [90, 70, 50]
        layer.plan(
            MlaStep(
                torch.tensor([0, 1, 5, 25], dtype=torch.int32),
                torch.tensor(seq_lens, dtype=torch.int32),
                torch.zeros(3, 2, dtype=torch.int32),
                num_tokens=25,
                query_lens=query_lens,
                max_seq_lens=seq_lens,
            ),
            absorbed_rows=absorbed,
        )
        queries = torch.zeros(25, 16, 128 + 64, dtype=torch.float16)
        layer.append(queries[:, 0, :1].expand(-1, 512).contiguous(), queries[:, 0, :64], cache)
        layer.attend(queries[..., :128], queries[..., 128:], cache, weights)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256)], ids=["hopper", "portable"])
def test_no_prompt_launches_another_kernel(launched, dims, causal):
    """Keys and values of one projection, queries of another, and lse as vLLM merges it."""
    nope, rope, value = dims
    config = PrefillConfig(
        num_heads=16,
        softmax_scale=0.1,
        max_rows=8,
        max_tokens=64,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        causal=causal,
    )
    prompts = Prefill(config, "cpu")
    prompts.warm_up()
    with only_what_is_warm(launched):
        for tokens, keys in ((1, 1), (7, 90), (64, 640)):
            starts, ends = (torch.tensor([0, n], dtype=torch.int32) for n in (tokens, keys))
            q, heads = (
                torch.zeros(n, 16, width, dtype=config.dtype)
                for n, width in ((tokens, nope + rope), (keys, nope + value))
            )
            k_pe = torch.zeros(keys, rope, dtype=config.dtype)
            prompts.plan(starts, ends, num_tokens=tokens)
            lse = torch.empty(16, tokens).t()
            prompts.attend(
                *q.split([nope, rope], -1), heads[..., :nope], k_pe, heads[..., nope:], lse=lse
            )


def test_a_warm_layer_has_the_outputs_of_a_new_one():
    step = build((70, 3), (33, 2), num_heads=4)
    weights, before = weights_of(4), step.cache.clone()
    layers = [MlaLayer(layer_config(step.config, 64), "cpu") for _ in range(2)]
    layers[0].warm_up(step.cache, weights)
    torch.testing.assert_close(step.cache, before, rtol=0, atol=0, equal_nan=True)
    answers = []
    for layer in layers:
        plan(layer, step, absorbed_rows=0, **lens_of(step))
        answers.append(attend(layer, step, queries_of(step, weights), weights))
    torch.testing.assert_close(*answers, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{}, {"rope": Rope(RopePairing.NEOX)}, {"max_rows": 2}])
def test_the_cache_and_the_planned_step_stay(changes):
    """Between a plan and its layers too."""
    step = build((70, 1), (33, 2), **changes)
    expected = step.attend()
    mla, before = PagedMla(step.config, "cpu"), step.cache.clone()
    mla.plan(step.described)
    mla.warm_up(step.cache)
    torch.testing.assert_close(step.cache, before, rtol=0, atol=0, equal_nan=True)
    found = mla.attend(step.q_nope, step.q_pe, step.cache)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["fp8_block_group", "fp8_block_token", "fp8_ds_mla"])
def test_bytes_and_scales_stay(name):
    step = build_fp8(name, (70, 1), (33, 2))
    cache = step.cache
    before = [tensor.clone() for tensor in (cache.latents, cache.scales) if tensor is not None]
    PagedMla(step.config, "cpu").warm_up(cache)
    after = [tensor for tensor in (cache.latents, cache.scales) if tensor is not None]
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("request_map", torch.zeros(2, 256, dtype=torch.int32)),
        ("request_ids", RequestMap(torch.zeros(2, 256, dtype=torch.int32), [0, 1])),
    ],
    ids=["a-table", "a-list"],
)
def test_what_is_no_request_map(argument, given):
    """S-1: it is named before anything is launched."""
    step = build((20, 3), table_multiple=4)
    with pytest.raises(InvalidArgument) as error:
        PagedMla(step.config, "cpu").warm_up(step.cache, given)
    assert error.value.argument == argument


def test_another_cache_is_refused():
    step = build((70, 1))
    with pytest.raises(InvalidArgument, match="cache"):
        PagedMla(step.config, "cpu").warm_up(step.cache[..., :-1])


@pytest.mark.parametrize("cache_format", ["fp16", "fp8_e4m3"])
def test_no_step_of_a_rank_launches_another_kernel(launched, group_of_one, cache_format):
    """S-18: tables of any width, and the lines of partial results."""
    assert group_of_one.size() == 1
    config = small(cache_format=cache_format)
    mla, cache = ContextParallelMla(config, group_of_one, "cpu"), cache_of(config)
    mla.warm_up(cache)
    with only_what_is_warm(launched):
        for rows, tokens, width in ((1, 1, 1), (3, 7, 5), (8, 64, 32), (8, 48, 64)):
            lengths = torch.zeros(rows + 1, dtype=torch.int32)
            table = torch.zeros(rows, width, dtype=torch.int32)
            mla.plan(MlaStep(lengths, lengths[:-1], table, num_tokens=tokens))
            queries = torch.zeros(tokens, 16, 512 + 64, dtype=torch.float16)
            mla.append(queries[:, 0, :512], queries[:, 0, 512:], cache)
            mla.attend(queries[..., :512], queries[..., 512:], cache)
