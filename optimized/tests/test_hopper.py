"""Which problems the Gluon kernels for Hopper serve; that they are right is for a GPU to show."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from paged_mla_optimized import MlaConfig, PagedMla
from paged_mla_optimized.config.architectures import SHARED_MEMORY
from paged_mla_optimized.kernels.hopper.rope import RopeTables
from paged_mla_optimized.operations.attend import hopper
from paged_mla_optimized.operations.attend.attention import Attention, Workspace
from paged_mla_optimized.operations.attend.hopper import (
    HopperAttention,
    cache_fits,
    hopper_box,
    hopper_boxes,
    hopper_spec,
    queries_fit,
)
from paged_mla_optimized.operations.attend.portable import PortableAttention
from paged_mla_optimized.operations.queries.quantize import QuantizeQueries
from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_optimized.operations.queries.rotate import RotateQueries
from paged_mla_optimized.planning.choice import demand_of
from paged_mla_optimized.planning.families import serving_variant
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

CONFIG = MlaConfig(
    num_heads=16,
    softmax_scale=0.1,
    block_size=64,
    max_rows=8,
    max_query_tokens=8,
    max_model_len=1024,
)
FP8 = replace(CONFIG, cache_format="fp8_e4m3")


FAST = replace(CONFIG, num_heads=128, cache_format="fp8_e4m3", products="fast")


def served(config):
    """Return what decode of `config` gets on Hopper."""
    return serving_variant(demand_of(config, "sm90"), 1)


def cache(
    token_stride: int, block_stride: int, offset: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return a cache [4, 64, 576] with these strides, `offset` elements into its storage."""
    storage = torch.zeros(4 * block_stride + offset + 8, dtype=dtype)
    return storage[offset:].as_strided((4, 64, 576), (block_stride, token_stride, 1))


DENSE = cache(576, 64 * 576)
TWO_BLOCKS = DENSE[:2]


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (cache(576, 64 * 576), True),
        (cache(584, 65 * 584), True),
        (cache(577, 64 * 577), False),
        (cache(576, 64 * 576 + 8), False),
        (cache(576, 64 * 576, offset=1), False),
        (DENSE[:0], False),
    ],
    ids=["dense", "padded", "odd-token", "odd-block", "odd-start", "no-block"],
)
def test_cache_must_be_rows_of_one_stride(tensor, fits):
    """The portable kernel serves other strides, for every config."""
    assert cache_fits(tensor) is fits


def queries(width: int, token_stride: int, head_stride: int, offset: int = 0) -> torch.Tensor:
    """Return queries [4, 16, width] with these strides, `offset` elements into their storage."""
    storage = torch.zeros(4 * token_stride + offset + width, dtype=torch.bfloat16)
    return storage[offset:].as_strided((4, 16, width), (token_stride, head_stride, 1))


Q_NOPE, Q_PE = queries(512, 16 * 512, 512), queries(64, 16 * 64, 64)


@pytest.mark.parametrize(
    ("q_nope", "q_pe", "fits"),
    [
        (Q_NOPE, Q_PE, True),
        (queries(512, 16 * 576, 576), queries(64, 16 * 576, 576, offset=512), True),
        (queries(512, 16 * 512, 512, offset=8), Q_PE, True),
        (queries(512, 16 * 512, 512, offset=1), Q_PE, False),
        (Q_NOPE, queries(64, 16 * 64, 64, offset=4), False),
        (queries(512, 16 * 520, 520), Q_PE, False),
        (queries(512, 16 * 512 + 8, 512), Q_PE, False),
        (Q_NOPE, queries(64, 16 * 72, 72), False),
        (Q_NOPE, queries(64, 16 * 64 + 1, 64), False),
    ],
    ids=[
        "dense", "one-tensor", "16-bytes", "address", "rope-address", "head", "token", "rope-head",
        "rope-token",
    ],
)  # fmt: skip
def test_queries_must_be_copied_16_bytes_at_a_time(monkeypatch, q_nope, q_pe, fits):
    """Others are left to the portable kernel: the compiler knows multiples of 16 only."""
    assert queries_fit(q_nope, q_pe) is fits
    launched = []
    for kind in (HopperAttention, PortableAttention):
        monkeypatch.setattr(kind, "launch", lambda self, *_, **__: launched.append(type(self)))
    memory = Workspace(CONFIG, [served(CONFIG)], 132, torch.device("cpu"), None)
    attention = Attention(CONFIG, served(CONFIG), DeviceFacts("sm90", 132), memory)
    given = Queries(q_nope, q_pe), LatentCache("bf16", DENSE), Answer(None, None)
    attention.attend(None, *given)
    assert launched == [HopperAttention if fits else PortableAttention]


ROTATED = {
    name: replace(config, rope=Rope(RopePairing.NEOX))
    for name, config in {
        "few": CONFIG,
        "tile": replace(CONFIG, num_heads=128),
        "few-fp8": FP8,
        "tile-exact": replace(FP8, num_heads=128),
        "tile-fp8": FAST,
    }.items()
}


def addresses_of(arguments):
    """Return the addresses of the tensors of a launch, including those in records."""
    every = [x for one in arguments for x in (one if isinstance(one, tuple) else (one,))]
    return {x.data_ptr() for x in every if isinstance(x, torch.Tensor)}


class Launches:
    """Attention of a config with a rope, whose launches leave their pointers here."""

    def __init__(self, monkeypatch, config):
        self.hopper, self.quantize, self.rotate, self.portable = [], [], [], []
        monkeypatch.setattr(hopper, "Launcher", lambda *_, **__: self.into(self.hopper))
        cpu, variant = torch.device("cpu"), served(config)
        self.tables = rope_tables(config.rope, 64, config.max_model_len, config.dtype)
        quantize = QuantizeQueries(config, "sm90", self.tables)
        rotate = RotateQueries(config, "sm90", self.tables)
        memory = Workspace(config, [variant], 132, cpu, None)
        attention = Attention(
            config, variant, DeviceFacts("sm90", 132), memory, quantize=quantize, rotate=rotate
        )
        monkeypatch.setattr(quantize._quantize, "_kernels", [self.into(self.quantize)])
        monkeypatch.setattr(rotate, "_kernel", self.into(self.rotate))
        monkeypatch.setattr(attention._portable, "_kernel", self.into(self.portable))
        self.config, self.attention, self.rotated = config, attention, rotate.q_pe
        self.plan = Plan(config, [variant], 132, cpu)

    def into(self, launches):
        return lambda _grid, _key, *arguments: launches.append(arguments)

    def attend(self, q_nope, q_pe):
        dtype = torch.uint8 if self.config.is_fp8 else torch.bfloat16
        scales = torch.ones(()) if self.config.is_fp8 else None
        latents = LatentCache(self.config.cache_format, cache(576, 64 * 576, dtype=dtype), scales)
        answer = Answer(Q_NOPE, torch.zeros(4, 16))
        self.attention.attend(self.plan, Queries(q_nope, q_pe), latents, answer)


@pytest.mark.parametrize("q_pe", [Q_PE, queries(64, 16 * 65, 65, offset=1)], ids=["even", "odd"])
@pytest.mark.parametrize("pairing", [RopePairing.INTERLEAVED, RopePairing.NEOX])
@pytest.mark.parametrize("name", ["few", "tile", "few-fp8", "tile-exact"])
def test_queries_are_rotated_where_they_are_read(monkeypatch, name, pairing, q_pe):
    """S-12: kernels get q_pe unrotated, in any layout, with positions and tables."""
    launches = Launches(monkeypatch, replace(ROTATED[name], rope=Rope(pairing)))
    launches.attend(Q_NOPE, q_pe)
    ((_work, _q_nope, lines, tables, *_),) = launches.hopper
    assert lines[0] is q_pe
    expected = (launches.plan.positions, *launches.tables)
    assert all(mine is theirs for mine, theirs in zip(tables, expected, strict=True))
    assert not launches.rotate + launches.portable + launches.quantize


def test_queries_are_rotated_where_they_are_quantized(monkeypatch):
    """S-12: codes are of rotated queries, and their kernel gets no tables."""
    launches = Launches(monkeypatch, ROTATED["tile-fp8"])
    launches.attend(Q_NOPE, Q_PE)
    ((_, q_pe, _, _, _, positions, cos, sin, *_),) = launches.quantize
    assert q_pe is Q_PE
    assert (positions is launches.plan.positions, (cos, sin)) == (True, launches.tables)
    assert launches.plan.positions.data_ptr() not in addresses_of(launches.hopper[0])
    assert not launches.rotate + launches.portable


@pytest.mark.parametrize("name", ["few", "tile", "few-fp8"])
def test_queries_are_rotated_before_the_portable_kernel(monkeypatch, name):
    """S-12: it steps in for q_nope that cannot be copied, and reads a rotated copy."""
    launches = Launches(monkeypatch, ROTATED[name])
    launches.attend(queries(512, 16 * 512, 512, offset=1), Q_PE)
    assert launches.rotate[0][0] is Q_PE
    assert launches.portable[0][2][0] is launches.rotated
    assert not launches.hopper


@pytest.mark.parametrize("config", [CONFIG, FP8, FAST], ids=["few", "few-fp8", "tile-fp8"])
def test_kernels_are_compiled_without_what_they_need_not(config):
    """Without a rope there is nothing of it to pass, or to read."""
    types = hopper_spec(config, served(config), 64, 576).types
    assert types.get("rope_tables") == (None if config is FAST else RopeTables(None, None, None))


@pytest.mark.parametrize(
    ("block_size", "keys"),
    [(8, 8), (32, 32), (64, 64), (256, 64), (1, 0), (4, 0), (48, 0), (96, 0)],
)
def test_a_copy_stays_inside_a_block(block_size, keys):
    """S-1: one copy takes a block, or a key tile of a larger one; else keys come one by one."""
    assert hopper_box(block_size) == keys
    config = replace(CONFIG, block_size=block_size)
    boxes = [keys or 64, 512], [keys or 64, 64]
    assert hopper_boxes(config, served(config)) == boxes


@pytest.mark.parametrize(
    ("config", "columns"),
    [(FAST, 128), (FP8, 256), (ROTATED["tile-exact"], 256)],
    ids=["fast", "few", "tile"],
)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_boxes_of_fp8_caches_are_words(config, columns, block_size):
    """S-11: two codes are a word; half of a row's latent columns a copy, or all of them."""
    keys = hopper_box(block_size) or 64
    config = replace(config, block_size=block_size)
    assert hopper_boxes(config, served(config)) == ([keys, columns], [keys, 32])


def test_boxes_of_rows_with_scales_leave_them_out():
    """S-11: k_pe is 64 words of 16 bits, at any offset."""
    config = replace(FP8, cache_format="fp8_ds_mla")
    assert hopper_boxes(config, served(config)) == ([64, 256], [64, 64])


@pytest.mark.parametrize("num_heads", [16, 32])
def test_the_ring_holds_as_many_key_tiles_as_fit(num_heads):
    """Queries, weights and key tiles share what a program may have."""
    config = replace(CONFIG, num_heads=num_heads)
    stages = hopper_spec(config, served(config), 64, 576).constants["STAGES"]
    taken = (num_heads + 64 * stages) * 576 * 2 + 64 * num_heads * 2
    assert taken < SHARED_MEMORY["sm90"] <= taken + 64 * 576 * 2 + 1024


@pytest.mark.parametrize(
    ("cache_format", "key", "ratios", "pairs", "pieces"),
    [
        ("fp8_e4m3", 576, 0, 16, 1),
        ("fp8_e4m3", 576, 0, 32, 1),
        ("fp8_block_token", 580, 0, 16, 1),
        ("fp8_block_token", 580, 0, 32, 1),
        ("fp8_block_group", 580, 0, 16, 1),
        ("fp8_block_group", 580, 0, 32, 1),
        ("fp8_ds_mla", 656, 4, 16, 1),
        ("fp8_ds_mla", 656, 4, 32, 1),
        ("fp8_ds_mla", 656, 4, 64, 2),
    ],
)
def test_the_ring_holds_as_many_fp8_tiles_as_fit(cache_format, key, ratios, pairs, pieces):
    """Queries, weights, ratios and keys with their scales share what a program may have."""
    dtype = torch.bfloat16 if pieces == 1 else torch.float16
    config = replace(CONFIG, num_heads=pairs, cache_format=cache_format, dtype=dtype)
    variant = served(config)
    stages = hopper_spec(config, variant, 64, key // 2).constants["STAGES"]
    tile = variant.tile_n * key
    taken = tile * stages + variant.tile_m * (512 + 64 * pieces + variant.tile_n) * 2
    taken += variant.tile_n * ratios * 2
    assert stages > 1
    assert taken < SHARED_MEMORY["sm90"] <= taken + tile + 1024


@pytest.mark.parametrize(
    ("num_heads", "programs", "cluster"),
    [(128, 132, 2), (128, 131, 1), (64, 132, 1)],
    ids=["lanes", "odd-grid", "one-lane"],
)
def test_lanes_run_side_by_side(monkeypatch, num_heads, programs, cluster):
    """Programs that read the same keys make clusters, where the grid is made of pairs."""
    asked = []
    monkeypatch.setattr(hopper, "Launcher", lambda *_, cluster, **__: asked.append(cluster))
    config = replace(CONFIG, num_heads=num_heads)
    HopperAttention(config, served(config), programs).rows_of(DENSE)
    assert asked == [cluster]


@pytest.fixture
def attention():
    """Return the launcher of the kernel that serves `CONFIG`."""
    return HopperAttention(CONFIG, served(CONFIG), programs=132)


def test_descriptors_cover_the_cache(attention):
    """S-1: rows of one stride from the first token's address, up to the last token's."""
    padded = cache(584, 65 * 584)
    wide, slim = attention.rows_of(padded).descriptors.descriptors
    for descriptor in (wide, slim):
        assert descriptor.base.data_ptr() == padded.data_ptr()
        assert descriptor.base.dtype == padded.dtype
        assert descriptor.shape == [3 * 65 + 64, 576]
        assert descriptor.strides == [584, 1]
    assert (wide.block_shape, slim.block_shape) == ([64, 512], [64, 64])


@pytest.mark.parametrize(("config", "columns"), [(FAST, 128), (FP8, 256)], ids=["fast", "exact"])
def test_descriptors_of_fp8_caches_are_words(config, columns):
    """S-1, S-11: as many rows, of half as many words as bytes, swizzled as wide as a box."""
    padded = cache(592, 65 * 592, dtype=torch.uint8)
    attention = HopperAttention(config, served(config), programs=132)
    wide, slim = attention.rows_of(padded).descriptors.descriptors
    for descriptor in (wide, slim):
        assert descriptor.base.data_ptr() == padded.data_ptr()
        assert descriptor.base.dtype == torch.int16
        assert descriptor.shape == [3 * 65 + 64, 288]
        assert descriptor.strides == [296, 1]
    assert (wide.block_shape, slim.block_shape) == ([64, columns], [64, 32])
    assert (wide.layout.swizzle_byte_width, slim.layout.swizzle_byte_width) == (128, 64)


def test_a_scale_tensor_of_other_strides_is_another_kernel(monkeypatch):
    """S-11: which element of it holds a block's scales is compiled in."""
    strides = []
    monkeypatch.setattr(
        hopper,
        "Launcher",
        lambda spec, **_: strides.append(spec.constants["scale_format"].stride_block),
    )
    config = replace(FAST, cache_format="fp8_block_token")
    attention = HopperAttention(config, served(config), programs=132)
    latents = cache(576, 64 * 576, dtype=torch.uint8)
    first = attention.rows_of(latents, 64)
    assert attention.rows_of(latents, 128) is not first
    assert attention.rows_of(latents, 64) is first
    assert strides == [64, 128]


@pytest.mark.parametrize("products", ["fast", "exact"])
def test_code_buffers_exist_for_fast_products(products):
    """S-17: allocated once, for the largest step, and listed in `memory()`."""
    config = replace(FAST, dtype=torch.float16, products=products)
    mla = PagedMla(config, "cpu", variant=served(config))
    shapes = {buffer.name: buffer.shape for buffer in mla.memory()}
    if products == "fast":
        assert (shapes["q_codes"], shapes["q_scales"]) == ((8, 128, 576), (8, 128))
    else:
        assert "q_codes" not in shapes


@pytest.mark.parametrize("offset", [0, 1])
def test_queries_are_quantized_first(monkeypatch, offset):
    """S-5: by a launch that reads any strides; the kernel gets codes, scales and both caches."""
    launched = []
    monkeypatch.setattr(
        hopper, "Launcher", lambda *_, **__: lambda _grid, _key, *taken: launched.append(taken)
    )
    quantize = QuantizeQueries(FAST, "sm90", (torch.empty(0), torch.empty(0)))
    asked = []
    from_data = [lambda _grid, _key, *taken: asked.append(taken)]
    monkeypatch.setattr(quantize._quantize, "_kernels", from_data)
    memory = Workspace(FAST, [served(FAST)], 132, torch.device("cpu"), None)
    attention = Attention(FAST, served(FAST), DeviceFacts("sm90", 132), memory, quantize=quantize)
    q_nope = torch.zeros(4 * 128 * 512 + 8)[offset:][: 4 * 128 * 512].view(4, 128, 512)
    q_pe, out, lse = torch.zeros(4, 128, 64), torch.zeros(4, 128, 512), torch.zeros(4, 128)
    plan = Plan(FAST, [served(FAST)], 132, torch.device("cpu"))
    latents, scale = cache(576, 64 * 576, dtype=torch.uint8), torch.ones(())
    given = LatentCache("fp8_e4m3", latents, scale)
    attention.attend(plan, Queries(q_nope, q_pe), given, Answer(out, lse))
    ((*queries, codes, scales),) = (taken[:4] for taken in asked)
    assert [q.data_ptr() for q in queries] == [q_nope.data_ptr(), q_pe.data_ptr()]
    ((_work, first, second, cached, cache_scale, *_),) = launched
    assert (first is codes, second is scales) == (True, True)
    assert (cached is latents, cache_scale is scale) == (True, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("options", "is_rounded"),
    [({}, True), ({"batch_invariant": True}, False), ({"products": "exact"}, False)],
    ids=["fast", "fixed-splits", "exact"],
)
def test_partials_of_fast_products_have_the_dtype_of_outputs(dtype, options, is_rounded):
    """S-5, S-8: others, and sums that another program goes on with, stay float32."""
    config = replace(FAST, dtype=dtype, **options)
    variant = served(config)
    memory = Workspace(config, [variant], 132, torch.device("cpu"), None)
    memory.memory.fill_(0)
    out, lse = memory.partials(variant)
    assert out.dtype == (dtype if is_rounded else torch.float32)
    assert (out.shape[:2], out.shape[2], lse.dtype) == (lse.shape, 512, torch.float32)
    out.fill_(1)
    assert not lse.any()


def test_steps_over_e4m3_reach_their_kernel(monkeypatch):
    """S-11: what PagedMla is given, bytes or e4m3, is what the kernel gets, with the scale."""
    launched = []
    config = replace(FP8, dtype=torch.float16)
    mla = PagedMla(config, "cpu", variant=served(config))
    monkeypatch.setattr(
        hopper, "Launcher", lambda *_, **__: lambda _grid, _key, *taken: launched.append(taken)
    )
    mla.plan(
        MlaStep(
            *(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [70], [[2, 1]])), num_tokens=1
        )
    )
    combine = mla._core._attentions[0]._combine
    monkeypatch.setattr(combine, "launch", lambda *_, **__: None)
    latents, scales = cache(576, 64 * 576, dtype=torch.uint8), torch.ones(9)
    queries = (torch.zeros(1, 16, n, dtype=torch.float16) for n in (512, 64))
    given = LatentCache("fp8_e4m3", latents.view(torch.float8_e4m3fn), scales[3])
    mla.attend(*queries, given)
    ((_work, _q_nope, _q_pe, _tables, cached, scale, *_),) = launched
    assert (cached.data_ptr(), cached.dtype) == (latents.data_ptr(), torch.uint8)
    assert scale.data_ptr() == scales[3].data_ptr()


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (DENSE[:2], True),
        (DENSE[1:3], False),
        (DENSE[:3], False),
        (DENSE[::2], False),
        (DENSE.as_strided((2, 64, 576), (64 * 584, 584, 1)), False),
    ],
    ids=["same", "address", "blocks", "block-stride", "token-stride"],
)
def test_maps_are_of_one_cache(attention, other, same):
    """S-1: another address, size or stride is another map, never one made before."""
    assert (attention.rows_of(TWO_BLOCKS) is attention.rows_of(other)) is same


def test_caches_are_not_kept_alive(attention):
    """What is remembered of a cache does not hold its memory."""
    storage = np.zeros((4, 64, 576), np.int16)
    memory = weakref.ref(storage)
    rows = attention.rows_of(torch.from_numpy(storage).view(torch.bfloat16))
    del storage
    assert memory() is None
    assert rows is not None


def test_remembered_caches_are_bounded(monkeypatch):
    """An engine may make new caches without end."""
    monkeypatch.setattr(hopper, "MAX_CACHES", 2)
    attention = HopperAttention(CONFIG, served(CONFIG), programs=132)
    views = [DENSE[:n] for n in (1, 2, 3)]
    first, second, third = map(attention.rows_of, views)
    assert attention.rows_of(views[2]) is third
    assert attention.rows_of(views[0]) is not first
    assert attention.rows_of(views[1]) is not second


def test_remembered_kernels_are_bounded(monkeypatch):
    """Each other stride of a cache is a kernel of its own."""
    monkeypatch.setattr(hopper, "MAX_KERNELS", 2)
    attention = HopperAttention(CONFIG, served(CONFIG), programs=132)
    caches = [cache(width, 64 * width) for width in (576, 584, 592)]
    first, second, third = [attention.rows_of(each).kernel for each in caches]
    again = [attention.rows_of(each[:2]).kernel for each in reversed(caches)]
    assert again[0] is third
    assert again[1] is not second
    assert again[2] is not first
