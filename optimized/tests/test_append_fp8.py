"""Appending to FP8 caches, bit for bit: each token has its own scales, or the layer's."""

import pytest
import torch
from fp8_step import NAMES, as_rows, empty_cache, scales_of
from mla_step import P, R, config

from paged_mla_optimized import LatentCache, PagedMla
from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

I32 = torch.int32
EACH_TOKEN = [name for name in NAMES if name != "fp8_block_group"]
SLOTS = (37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 16)  # of positions 5 to 16 below

each_format = pytest.mark.parametrize("name", EACH_TOKEN)


def planned(name, **changes):
    """Return an instance whose step appends 12 tokens to blocks 2 and 1 from position 5 on."""
    mla = PagedMla(config(cache_format=name, **changes), "cpu")
    cu, lens = torch.tensor([0, 12], dtype=I32), torch.tensor([17], dtype=I32)
    mla.plan(MlaStep(cu, lens, torch.tensor([[2, 1]], dtype=I32), num_tokens=13))
    assert tuple(mla.slot_mapping.tolist()) == (*SLOTS, -1)
    return mla


def tokens(count=13, seed=5):
    """Return latents and keys of magnitudes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, R + P, generator=generator)
    return x * 10 ** torch.linspace(-3, 3, count)[:, None]


def expected(name, x, slots, cache):
    """Return the cache after tokens [n, R + P] are written to `slots`."""
    latents, scales = cache.latents.clone(), cache.scales
    scale = scales_of(name, x, 1)
    rows = as_rows(name, x, scale)
    latents.view(-1, latents.shape[2])[list(slots)] = rows
    if name == "fp8_block_token":
        scales = scales.clone()
        scales.view(-1)[list(slots)] = scale[:, 0]
    return LatentCache(name, latents, scales)


def assert_same_bytes(cache, other):
    assert torch.equal(cache.latents, other.latents)
    if cache.scales is not None:
        assert torch.equal(cache.scales.view(I32), other.scales.view(I32))


@each_format
def test_writes_the_planned_slots_and_nothing_else(name):
    """S-10, S-11: every byte of a row and its scale; padded tokens write nothing."""
    x, cache = tokens(), empty_cache(name, 4, 16)
    wanted = expected(name, x[:12], SLOTS, cache)
    planned(name).append(x[:, :R], x[:, R:], cache)
    assert_same_bytes(cache, wanted)


@each_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_of_each_type(name, dtype):
    """S-11: widened to float32 first; keys of fp8_ds_mla are rounded to bfloat16."""
    x, cache = tokens().to(dtype), empty_cache(name, 4, 16)
    wanted = expected(name, x[:12].float(), SLOTS, cache)
    planned(name, dtype=dtype).append(x[:, :R], x[:, R:], cache)
    assert_same_bytes(cache, wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")  # past float32 is past e4m3
@each_format
def test_no_number_is_left_out(name):
    """S-11: zeros, infinities, NaN and subnormal numbers; only finite ones make scales."""
    x, cache = tokens(), empty_cache(name, 4, 16)
    x[0] = 0.0
    x[1, ::5] = torch.inf
    x[2, ::7] = -torch.inf
    x[3, ::3] = torch.nan
    x[4] *= 1e-38
    x[5] = torch.nan
    x[6, ::2] = -0.0
    x[7] *= 1e36
    wanted = expected(name, x[:12], SLOTS, cache)
    if name == "fp8_ds_mla":  # the NaN of a key is 0x7fff
        keys = wanted.latents[..., -2 * P :].view(torch.int16)
        keys[keys & 0x7FFF > 0x7F80] = 0x7FFF
    planned(name).append(x[:, :R], x[:, R:], cache)
    assert_same_bytes(cache, wanted)


@each_format
def test_given_and_reserved_slots(name):
    """S-10: the engine's own slots, of which negative and reserved ones write nothing."""
    x, cache = tokens(), empty_cache(name, 4, 16)
    slots = torch.full((13,), -1)
    slots[:4] = torch.tensor([40, 9, 9, 0])
    slots[2] = -5
    wanted = expected(name, x[[0, 3]], (40, 0), cache)
    planned(name, reserved_slot=9).append(x[:, :R], x[:, R:], cache, slots)
    assert_same_bytes(cache, wanted)


@each_format
def test_strided_latents_cache_and_scales(name):
    """S-10: gaps in the cache and between blocks of scales keep their bits."""
    x, dense = tokens(), empty_cache(name, 4, 16)
    mla = planned(name)
    mla.append(x[:, :R], x[:, R:], dense)
    width = dense.latents.shape[2]
    pool = torch.full((4, 20, width + 8), 0x11, dtype=torch.uint8)
    view = pool[:, 2:18, 4 : width + 4]
    start = empty_cache(name, 4, 16)
    view.copy_(start.latents)
    scales = start.scales
    if name == "fp8_block_token":
        scales = torch.full((4, 3, 16), 5.0)[:, 1:2]
        scales.copy_(start.scales)
    mla.append(x[:, :R], x[:, R:], LatentCache(name, view, scales))
    assert_same_bytes(LatentCache(name, view, scales), dense)
    view.fill_(0x11)
    assert (pool == 0x11).all()


@each_format
@pytest.mark.parametrize("pairing", list(RopePairing))
def test_keys_are_rotated_and_rounded_before_they_are_encoded(name, pairing):
    """S-11, S-12: to the dtype first, as a plain cache would have them."""
    rope = Rope(pairing, theta=100.0)
    x = tokens().half()
    cache = empty_cache(name, 4, 16)
    mla = planned(name, dtype=torch.float16, rope=rope)
    cos, sin = (table[5:17] for table in rope_tables(rope, P, 256, torch.float16))
    k_pe = x[:12, R:].float()
    k_pe = k_pe.view(12, P // 2, 2).mT if pairing == "interleaved" else k_pe.view(12, 2, P // 2)
    first, second = k_pe[:, 0] * cos - k_pe[:, 1] * sin, k_pe[:, 1] * cos + k_pe[:, 0] * sin
    turned = torch.stack([first, second], dim=1).half()
    turned = turned.mT if pairing == "interleaved" else turned
    rotated = torch.cat([x[:12, :R], turned.reshape(12, P)], dim=1).float()
    wanted = expected(name, rotated, SLOTS, cache)
    mla.append(x[:, :R], x[:, R:], cache)
    assert_same_bytes(cache, wanted)


def test_e4m3_tensors_are_bytes():
    """S-11: a cache of torch's own type gets the same bytes."""
    x, cache = tokens(), empty_cache("fp8_e4m3", 4, 16)
    typed = cache._replace(latents=cache.latents.clone().view(torch.float8_e4m3fn))
    mla = planned("fp8_e4m3")
    mla.append(x[:, :R], x[:, R:], cache)
    mla.append(x[:, :R], x[:, R:], typed)
    assert torch.equal(typed.latents.view(torch.uint8), cache.latents)
