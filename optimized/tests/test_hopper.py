"""Which problems the Gluon kernels for Hopper serve; that they are right is for a GPU to show."""

from dataclasses import replace

import pytest
import torch

from paged_mla_optimized import MlaConfig
from paged_mla_optimized.attend import choose_variant
from paged_mla_optimized.hopper import cache_fits, hopper_boxes
from paged_mla_optimized.variants import FEW, PORTABLE, TILE
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
        ({"num_heads": 24, "block_size": 8}, FEW, 32, 1),
        ({"max_query_tokens": 32}, TILE, 64, 4),
        ({"num_heads": 128, "block_size": 256}, TILE, 64, 2),
        ({"num_heads": 96, "dtype": torch.float16, "cache_format": "fp16"}, TILE, 64, 2),
    ],
    ids=["few", "few-32", "box-8", "chain", "two-lanes", "half"],
)
def test_hopper_serves(changes, family, tile_m, lanes):
    """S-20: up to 32 pairs a row go to one kernel, tiles of 64 to the other."""
    variant = choose_variant(replace(CONFIG, **changes), "sm90")
    assert (variant.family, variant.tile_m, variant.lanes) == (family, tile_m, lanes)


@pytest.mark.parametrize(
    ("changes", "arch"),
    [
        ({}, "sm80"),
        ({}, "sm100"),
        ({"dtype": torch.float32, "cache_format": "fp32"}, "sm90"),
        ({"block_size": 1}, "sm90"),
        ({"block_size": 48}, "sm90"),
        ({"kv_lora_rank": 256}, "sm90"),
        ({"qk_rope_head_dim": 32}, "sm90"),
        ({"rope": Rope(RopePairing.NEOX)}, "sm90"),
        ({"deterministic": True}, "sm90"),
    ],
    ids=["sm80", "sm100", "fp32", "block-1", "block-48", "rank", "rope-dim", "rope", "fixed"],
)
def test_portable_serves_the_rest(changes, arch):
    """S-20: what the Gluon kernels cannot do is never sent to them."""
    assert choose_variant(replace(CONFIG, **changes), arch).family == PORTABLE


def cache(token_stride: int, block_stride: int, offset: int = 0) -> torch.Tensor:
    """Return a cache [4, 64, 576] with these strides, `offset` elements into its storage."""
    storage = torch.zeros(4 * block_stride + offset + 8, dtype=torch.bfloat16)
    return storage[offset:].as_strided((4, 64, 576), (block_stride, token_stride, 1))


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
    """S-20: other strides are left to the portable kernel, whatever the config says."""
    assert cache_fits(tensor) is fits


@pytest.mark.parametrize(("block_size", "keys"), [(8, 8), (32, 32), (64, 64), (256, 64)])
def test_a_copy_stays_inside_a_block(block_size, keys):
    """S-1: one box is a block, or a key tile of a larger one."""
    config = replace(CONFIG, block_size=block_size)
    assert hopper_boxes(config, choose_variant(config, "sm90")) == ([keys, 512], [keys, 64])
