"""Which problems the Gluon kernels for Hopper serve; that they are right is for a GPU to show."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from paged_mla_optimized import MlaConfig
from paged_mla_optimized.launchers import hopper
from paged_mla_optimized.launchers.attend import choose_variant
from paged_mla_optimized.launchers.hopper import (
    HopperAttention,
    cache_fits,
    hopper_box,
    hopper_boxes,
    hopper_constants,
)
from paged_mla_optimized.planning.families import FEW, PORTABLE, SHARED_MEMORY, TILE
from paged_mla_shared.problem import Rope, RopePairing

CONFIG = MlaConfig(
    num_heads=16,
    softmax_scale=0.1,
    block_size=64,
    max_rows=8,
    max_query_tokens=8,
    max_model_len=1024,
)


@pytest.mark.parametrize(
    ("changes", "family", "tile_m", "lanes"),
    [
        ({}, FEW, 16, 1),
        ({"num_heads": 32}, FEW, 32, 1),
        ({"num_heads": 24, "block_size": 1}, FEW, 32, 1),
        ({"max_query_tokens": 32}, TILE, 64, 4),
        ({"num_heads": 128, "block_size": 256}, TILE, 64, 2),
        ({"kv_lora_rank": 256}, FEW, 16, 1),
        ({"kv_lora_rank": 256, "num_heads": 40}, FEW, 64, 1),
        ({"kv_lora_rank": 256, "num_heads": 128}, FEW, 64, 2),
        ({"deterministic": True}, FEW, 16, 1),
        ({"num_heads": 128, "deterministic": True}, TILE, 64, 2),
        ({"num_heads": 96, "dtype": torch.float16, "cache_format": "fp16"}, TILE, 64, 2),
    ],
    ids=[
        "few",
        "few-32",
        "block-1",
        "chain",
        "two-lanes",
        "256",
        "256-high",
        "256-two-lanes",
        "few-fixed",
        "tile-fixed",
        "half",
    ],
)
def test_hopper_serves(changes, family, tile_m, lanes):
    """Up to 32 pairs a row go to one kernel, tiles of 64 to the other."""
    variant = choose_variant(replace(CONFIG, **changes), "sm90")
    assert (variant.family, variant.tile_m, variant.lanes) == (family, tile_m, lanes)


@pytest.mark.parametrize(
    ("changes", "arch"),
    [
        ({}, "sm80"),
        ({}, "sm100"),
        ({"dtype": torch.float32, "cache_format": "fp32"}, "sm90"),
        ({"kv_lora_rank": 128}, "sm90"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "sm90"),
        ({"qk_rope_head_dim": 32}, "sm90"),
        ({"rope": Rope(RopePairing.NEOX)}, "sm90"),
    ],
    ids=["sm80", "sm100", "fp32", "rank", "both-dims", "rope-dim", "rope"],
)
def test_portable_serves_the_rest(changes, arch):
    """What the Gluon kernels cannot do is never sent to them."""
    assert choose_variant(replace(CONFIG, **changes), arch).family == PORTABLE


def cache(token_stride: int, block_stride: int, offset: int = 0) -> torch.Tensor:
    """Return a cache [4, 64, 576] with these strides, `offset` elements into its storage."""
    storage = torch.zeros(4 * block_stride + offset + 8, dtype=torch.bfloat16)
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
    ],
    ids=["dense", "padded", "odd-token", "odd-block", "odd-start"],
)
def test_cache_must_be_rows_of_one_stride(tensor, fits):
    """Other strides are left to the portable kernel, whatever the config says."""
    assert cache_fits(tensor) is fits


@pytest.mark.parametrize(
    ("block_size", "keys"),
    [(8, 8), (32, 32), (64, 64), (256, 64), (1, 0), (4, 0), (48, 0), (96, 0)],
)
def test_a_copy_stays_inside_a_block(block_size, keys):
    """S-1: one copy takes a block, or a key tile of a larger one; else keys come one by one."""
    assert hopper_box(block_size) == keys
    config = replace(CONFIG, block_size=block_size)
    boxes = [keys or 64, 512], [keys or 64, 64]
    assert hopper_boxes(config, choose_variant(config, "sm90")) == boxes


@pytest.mark.parametrize(
    ("rank", "num_heads", "stages"),
    [(512, 16, 2), (512, 32, 2), (256, 16, 5), (256, 32, 5), (256, 64, 4)],
)
def test_the_ring_holds_as_many_key_tiles_as_fit(rank, num_heads, stages):
    """Queries, weights and key tiles share what a program may have."""
    config = replace(CONFIG, kv_lora_rank=rank, num_heads=num_heads)
    constants = hopper_constants(config, choose_variant(config, "sm90"), 64, rank + 64)
    assert constants["STAGES"] == stages
    taken = (num_heads + 64 * stages) * (rank + 64) * 2 + 64 * num_heads * 2
    assert taken < SHARED_MEMORY["sm90"] <= taken + 64 * (rank + 64) * 2 + 1024


def test_boxes_are_as_wide_as_the_latents():
    """S-10: one copy takes all latent columns of a key, and its k_pe behind them."""
    config = replace(CONFIG, kv_lora_rank=256)
    assert hopper_boxes(config, choose_variant(config, "sm90")) == ([64, 256], [64, 64])


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
    HopperAttention(config, choose_variant(config, "sm90"), programs).rows_of(DENSE)
    assert asked == [cluster]


@pytest.fixture
def attention():
    """Return the launcher of the kernel that serves `CONFIG`."""
    return HopperAttention(CONFIG, choose_variant(CONFIG, "sm90"), programs=132)


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


def test_remembered_caches_are_bounded(attention, monkeypatch):
    """An engine may make new caches without end."""
    monkeypatch.setattr(hopper, "MAX_CACHES", 2)
    views = [DENSE[:n] for n in (1, 2, 3)]
    first, second, third = map(attention.rows_of, views)
    assert attention.rows_of(views[2]) is third
    assert attention.rows_of(views[0]) is not first
    assert attention.rows_of(views[1]) is not second
