"""A cache as an object: its format is the config's, its scales are those the format declares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_step import NAMES, codes, empty_cache, width_of
from mla_step import P, R, build, config

from paged_mla_optimized import DraftSteps, LatentCache, PagedMla
from paged_mla_optimized.backend.memory import Memory
from paged_mla_optimized.backend.places import OwnAllocations
from paged_mla_optimized.tensors.latent_cache import as_cache, tensors_of
from paged_mla_optimized.tensors.latent_cache import empty_cache as zeros_of
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.poison import poisoned_image
from paged_mla_shared.problem import Problem

SCALES_OUTSIDE = ("fp8_e4m3", "fp8_block_token", "fp8_block_group")


@pytest.mark.parametrize("num_blocks", [-1, 2**31, True, 1.0, "2", None])
def test_a_cache_has_a_number_of_blocks(num_blocks):
    """S-1: one that block tables can name."""
    with pytest.raises(InvalidArgument, match="num_blocks: got"):
        zeros_of(config(), num_blocks, "cpu")
    assert zeros_of(config(), np.int64(2), "cpu").latents.shape[0] == 2


def test_the_object_is_the_tensor_where_a_format_is_plain():
    """S-10, S-11: append, attend and gather_context give the same bits."""
    step = build((40, 3), (17, 1))
    found = []
    for make in (lambda cache: cache, lambda cache: LatentCache("fp32", cache)):
        mla, cache = PagedMla(step.config, "cpu"), step.cache.clone()
        step.attend(mla)
        mla.append(torch.ones(4, R), torch.ones(4, P), make(cache))
        out, _ = mla.attend(step.q_nope, step.q_pe, make(cache))
        ckv, k_pe = torch.zeros(57, R), torch.zeros(57, P)
        mla.gather_context(make(cache), ckv, k_pe)
        found.append([cache.nan_to_num(), out.clone(), ckv, k_pe])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("call", ["append", "attend", "gather_context"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cache: LatentCache("bf16", cache), "cache: got format bf16; allowed: fp32"),
        (
            lambda cache: LatentCache("fp32", cache, torch.ones(1)),
            "cache.scales: got a tensor; allowed: None in fp32",
        ),
        (lambda cache: LatentCache("fp32", cache[:, :8]), "cache: got shape"),
    ],
    ids=["format", "scales", "shape"],
)
def test_another_cache_is_refused(call, make, message):
    """S-11: before anything is written, naming what is wrong of the cache."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    latents = {"ckv": torch.ones(4, R), "k_pe": torch.ones(4, P)}
    queries = {"q_nope": step.q_nope, "q_pe": step.q_pe}
    before = step.cache.clone()
    with pytest.raises(InvalidArgument, match=message):
        getattr(mla, call)(cache=make(step.cache), **(queries if call == "attend" else latents))
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


def planned(name, **changes):
    """Return an instance for a cache of `name`, its step of four tokens planned."""
    step = build((20, 3), (33, 1), **changes)
    mla = PagedMla(config(cache_format=name, **changes), "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
    return mla


def append(mla, cache):
    mla.append(torch.ones(4, R), torch.ones(4, P), cache)


@pytest.mark.parametrize("name", SCALES_OUTSIDE)
def test_scales_are_those_of_the_format(name):
    """S-11: shape, dtype, device and stride; latents alone are no cache of such a format."""
    mla, cache = planned(name), empty_cache(name, 7, 16)
    right = cache.scales
    wrong = [None, right.double(), right[None], right.to("meta")]
    if right.dim() > 0:
        wrong += [right[1:], right.repeat_interleave(2, -1)[..., ::2]]
    for scales in wrong:
        with pytest.raises(InvalidArgument, match=r"cache\.scales: got .*; allowed: "):
            append(mla, cache._replace(scales=scales))
    with pytest.raises(InvalidArgument, match=r"cache\.scales: got None"):
        append(mla, cache.latents)
    append(mla, cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: c._replace(scales=torch.ones(())), "cache.scales: got a tensor; allowed: None"),
        (lambda c: c._replace(latents=c.latents[..., :-1]), "cache: got shape"),
        (lambda c: c._replace(latents=c.latents.view(torch.int8)), "cache: got torch.int8"),
        (lambda c: c._replace(latents=misplaced(c.latents, 1)), "got an address 1 past"),
        (lambda c: c._replace(latents=misplaced(c.latents, 0)), "got strides"),
    ],
    ids=["scales", "width", "dtype", "address", "strides"],
)
def test_rows_with_scales_among_them(make, message):
    """S-11: uint8 whose scales are at multiples of 4 bytes, and no scale tensor."""
    mla, cache = planned("fp8_ds_mla"), empty_cache("fp8_ds_mla", 7, 16)
    append(mla, cache)
    append(mla, cache.latents)
    with pytest.raises(InvalidArgument, match=message):
        append(mla, make(cache))


def misplaced(latents, start):
    """Return room for as many rows, from byte `start` on, two bytes apart if that is 0."""
    blocks, size, width = latents.shape
    apart = width if start else width + 2
    storage = torch.zeros(start + blocks * size * apart, dtype=torch.uint8)
    return storage[start:].as_strided(latents.shape, (size * apart, apart, 1), start)


@pytest.mark.parametrize("name", NAMES)
def test_the_suites_cache_keeps_its_bytes(name):
    """S-9, S-11: storage and scales, poison and live blocks, and what kernels see of them."""
    problem = Problem(
        dims=MlaDims(4, R, P, 16, 16),
        dtype="float32",
        cache_format=name,
        cache_scale=0.5,
        block_size=16,
        num_blocks=6,
        max_rows=1,
        max_query_tokens=1,
        max_model_len=16,
        softmax_scale=1.0,
        token_padding=4,
        block_padding=8,
    )
    layout = problem.layout
    image = poisoned_image(layout, np.array([4, 1]))
    layout.field(image.blocks, "ckv")[1, 2, 3] = 7
    layout.scales(image.blocks)[1] = 3
    device = torch.device("cpu")
    memory = Memory(problem, device, OwnAllocations(device))
    memory.load(image)
    every = np.arange(6)
    assert memory.read(every).tobytes() == image.read(every).tobytes()
    seen = as_cache(name, memory.cache)
    assert seen.latents[1, 2, 3] == codes(torch.tensor(7.0))
    assert seen.latents.shape == (6, 16, width_of(name))
    if name == "fp8_e4m3":
        assert seen.scales.tolist() == 0.5
    elif name != "fp8_ds_mla":
        assert (seen.scales[1] == 3).all()
        seen.scales[5] = 2
        assert (layout.scales(memory.read(np.array([5]))) == 2).all()


@pytest.mark.parametrize("name", NAMES)
def test_tails_are_copied_as_bytes_with_their_scales(name):
    """S-11, S-15: memory after the tail, and the scales that only it uses, stay unchanged."""
    sizes = {"max_requests": 2, "branches": 1, "steps": 1, "prefix_width": 1, "own_width": 1}
    drafts = DraftSteps(**sizes, block_size=16, device="cpu")
    lens, table = torch.tensor([10, 0], dtype=torch.int32), torch.tensor([[0], [9]]).int()
    own = torch.tensor([[[2]], [[1]]], dtype=torch.int32)
    cache = empty_cache(name, 4, 16)
    cache.latents.copy_(torch.randint(256, cache.latents.shape, dtype=torch.uint8))
    if cache.scales is not None and cache.scales.dim() > 0:
        cache.scales.copy_(torch.rand(cache.scales.shape))
    before = [t.clone() for t in tensors_of(cache)]
    drafts.copy_tails(cache, lens, table, own)
    before[0][2, :10] = before[0][0, :10]
    if name == "fp8_block_token":
        before[1][2, 0, :10] = before[1][0, 0, :10]
    if name == "fp8_block_group":
        before[1][2, 0, :3] = before[1][0, 0, :3]
    for mine, theirs in zip(tensors_of(cache), before, strict=True):
        assert torch.equal(mine, theirs)


def test_scales_of_tails_are_checked():
    """S-15: nothing is copied with scales of another shape."""
    sizes = dict.fromkeys(("max_requests", "branches", "steps", "prefix_width", "own_width"), 1)
    drafts = DraftSteps(**sizes, block_size=16, device="cpu")
    lens, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    cache = empty_cache("fp8_block_token", 4, 16)
    with pytest.raises(InvalidArgument, match=r"cache\.scales: got shape"):
        drafts.copy_tails(cache._replace(scales=cache.scales[1:]), lens, table, table[None] + 1)


def test_every_tensor_of_a_cache_has_an_address():
    """S-17: graphs watch scales as they watch latents."""
    latents, scales = torch.zeros(2, 16, 48), torch.ones(())
    assert tensors_of(latents) == [latents]
    assert tensors_of(LatentCache("fp32", latents)) == [latents]
    assert [t.data_ptr() for t in tensors_of(LatentCache("scaled", latents, scales))] == [
        latents.data_ptr(),
        scales.data_ptr(),
    ]


@pytest.mark.parametrize(
    ("given", "device", "name"),
    [(None, "cpu", "config"), ("bf16", "cpu", "config"), (config(), 1.5, "device")],
)
def test_a_new_cache_of_no_config_or_device(given, device, name):
    with pytest.raises(InvalidArgument, match=name):
        zeros_of(given, 3, device)
