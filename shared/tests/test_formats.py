"""What a cache format declares (S-11)."""

from __future__ import annotations

import pytest

from paged_mla_shared.dims import DEEPSEEK_V3
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheLayout


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("bf16", 1152),
        ("fp16", 1152),
        ("fp32", 2304),
        ("fp8_e4m3", 576),
        ("fp8_ds_mla", 656),
        ("fp8_block_token", 576),
        ("fp8_block_group", 576),
    ],
)
def test_token_bytes_at_deepseek_dims(name: str, token_bytes: int):
    """S-11: a format states the bytes of a token."""
    assert FORMATS[name].token_bytes(DEEPSEEK_V3) == token_bytes


@pytest.mark.parametrize(
    ("name", "shape", "block_bytes"),
    [
        ("bf16", None, 64 * 1152),
        ("fp8_e4m3", (), 64 * 576),
        ("fp8_ds_mla", None, 64 * 656),
        ("fp8_block_token", (10, 1, 64), 64 * 576 + 4 * 64),
        ("fp8_block_group", (10, 1, 4), 64 * 576 + 4 * 4),
    ],
)
def test_scale_tensor_and_block_bytes(name: str, shape: tuple[int, ...], block_bytes: int):
    """S-11: scales beside the cache have a declared shape and count towards a block's bytes."""
    assert FORMATS[name].scale_shape(10, 64) == shape
    assert FORMATS[name].block_bytes(DEEPSEEK_V3, 64) == block_bytes


def test_ds_mla_row_is_512_fp8_then_4_scales_then_64_bf16():
    """S-11: the 656-byte row, byte by byte."""
    fields = FORMATS["fp8_ds_mla"].fields(DEEPSEEK_V3)
    assert [(f.name, f.offset, f.nbytes) for f in fields] == [
        ("ckv", 0, 512),
        ("ckv_scale", 512, 16),
        ("k_pe", 528, 128),
    ]


def test_strides_include_padding():
    """S-9: gaps between tokens and between blocks belong to the layout."""
    layout = CacheLayout(FORMATS["bf16"], DEEPSEEK_V3, 16, 3, token_padding=64, block_padding=128)
    assert layout.token_stride == 1152 + 64
    assert layout.block_stride == 16 * layout.token_stride + 128
    assert layout.storage_bytes == 3 * layout.block_stride
