"""A cache as an object: its format is the config's, its scales are those the format declares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mla_step import P, R, build, config

from paged_mla_optimized import DraftSteps, LatentCache, PagedMla
from paged_mla_optimized.backend.memory import Memory
from paged_mla_optimized.cache import tensors_of
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE, CacheFormat, ScaleTensor
from paged_mla_shared.poison import poisoned_image
from paged_mla_shared.problem import Problem

SCALED = {"quarters": ScaleTensor.PER_GROUP, "tokens": ScaleTensor.PER_TOKEN}
SCALED |= {"scaled": ScaleTensor.SCALAR}


@pytest.fixture
def scaled(monkeypatch, request):
    """Let float32 latents have scales beside them: no kernel reads any yet."""
    name = request.param
    stored = CacheFormat(name, "float32", "float32", scale_tensor=SCALED[name])
    monkeypatch.setitem(FORMATS, name, stored)
    monkeypatch.setitem(PLAIN_FORMAT_OF_DTYPE, "float32", name)
    return name


each_format = pytest.mark.parametrize("scaled", SCALED, indirect=True)


def scales_of(name: str, blocks: int) -> torch.Tensor:
    """Return scales of as many blocks of 16 tokens."""
    return torch.ones(FORMATS[name].scale_shape(blocks, 16))


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


@each_format
def test_scales_are_those_of_the_format(scaled):
    """S-11: shape, dtype and device; latents alone are no cache of such a format."""
    step = build((20, 3), (33, 1), cache_format=scaled)
    mla = PagedMla(step.config, "cpu")
    mla.plan(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4)
    right = scales_of(scaled, len(step.cache))

    def append(scales):
        cache = LatentCache(scaled, step.cache, scales)
        mla.append(torch.ones(4, R), torch.ones(4, P), cache)

    append(right)
    for wrong in (None, right.double(), right[None], right.to("meta")):
        with pytest.raises(InvalidArgument, match=r"cache\.scales: got .*; allowed: "):
            append(wrong)
    with pytest.raises(InvalidArgument, match=r"cache\.scales: got None"):
        mla.append(torch.ones(4, R), torch.ones(4, P), step.cache)


@pytest.mark.parametrize("scaled", ["tokens"], indirect=True)
def test_ops_get_the_scales(scaled):
    """S-17: a compiled step hands both tensors on, and refuses what the eager one does."""
    step = build((20, 3), (33, 1), cache_format=scaled)
    mla = PagedMla(step.config, "cpu")

    def whole_step(cache):
        mla.plan(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4)
        mla.append(torch.ones(4, R), torch.ones(4, P), cache)
        return mla.attend(step.q_nope, step.q_pe, cache)[0].clone()

    torch._dynamo.reset()
    compiled = torch.compile(whole_step, fullgraph=True, backend="aot_eager")
    right = scales_of(scaled, len(step.cache))
    cache = LatentCache(scaled, step.cache, right)
    assert torch.equal(compiled(cache), whole_step(cache))
    with pytest.raises(InvalidArgument, match=r"cache\.scales: got shape"):
        compiled(cache._replace(scales=right[1:].clone()))


@each_format
def test_the_suites_cache_keeps_its_bytes(scaled):
    """S-9, S-11: storage and scales, poison and live blocks, and what kernels would see of them."""
    problem = Problem(
        dims=MlaDims(4, R, P, 16, 16),
        dtype="float32",
        cache_format=scaled,
        cache_scale=0.5 if scaled == "scaled" else 1.0,
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
    layout.field(image.blocks, "k_pe")[1, 2, 3] = 7
    layout.scales(image.blocks)[1] = 3
    memory = Memory(problem, torch.device("cpu"))
    memory.load(image)
    every = np.arange(6)
    assert memory.read(every).tobytes() == image.read(every).tobytes()
    assert memory.cache.latents[1, 2, R + 3] == 7
    if scaled == "scaled":
        assert memory.cache.scales.tolist() == 0.5
    else:
        assert (memory.cache.scales[1] == 3).all()
        memory.cache.scales[5] = 2
        assert (layout.scales(memory.read(np.array([5]))) == 2).all()


def test_tails_with_scales_of_their_own_are_not_copied_by_half():
    """S-15: latents without their scales would be wrong numbers."""
    sizes = dict.fromkeys(("max_requests", "branches", "steps", "prefix_width", "own_width"), 1)
    drafts = DraftSteps(**sizes, block_size=16, device="cpu")
    lens, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    own = torch.tensor([[[1]]], dtype=torch.int32)
    latents = torch.arange(2 * 16 * 8, dtype=torch.float32).view(2, 16, 8)
    with pytest.raises(Unsupported, match=r"cache\.scales"):
        drafts.copy_tails(LatentCache("tokens", latents, torch.ones(2, 1, 16)), lens, table, own)
    one = torch.tensor(0.5)
    drafts.copy_tails(LatentCache("scaled", latents, one), lens, table, own)
    assert torch.equal(latents[1, :3], latents[0, :3])
    assert not torch.equal(latents[1, 3], latents[0, 3])


def test_every_tensor_of_a_cache_has_an_address():
    """S-17: graphs watch scales as they watch latents."""
    latents, scales = torch.zeros(2, 16, 48), torch.ones(())
    assert tensors_of(latents) == [latents]
    assert tensors_of(LatentCache("fp32", latents)) == [latents]
    assert [t.data_ptr() for t in tensors_of(LatentCache("scaled", latents, scales))] == [
        latents.data_ptr(),
        scales.data_ptr(),
    ]


def test_a_config_of_a_format_without_kernels_is_unsupported():
    """S-11: what is declared elsewhere is refused here."""
    with pytest.raises(Unsupported, match="cache_format fp8_block_token"):
        config(cache_format="fp8_block_token")
