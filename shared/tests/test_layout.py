"""A cache as bytes: blocks with their scales, and poison."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_shared.dims import DEEPSEEK_V3, SMALL
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage, CacheLayout
from paged_mla_shared.poison import poisoned_image


def layout_of(name: str, **more: int) -> CacheLayout:
    """Return blocks of 8 tokens, 32 + 16 elements each."""
    return CacheLayout(FORMATS[name], SMALL, 8, 5, **more)


@pytest.mark.parametrize(("name", "scales"), [("fp8_block_token", 8), ("fp8_block_group", 4)])
def test_scales_follow_the_tokens_of_their_block(name: str, scales: int):
    """S-11: scales also follow the padding; views can be written."""
    layout = layout_of(name, token_padding=2, block_padding=6)
    assert layout.block_stride == 8 * 50 + 6
    assert layout.block_bytes == layout.block_stride + 4 * scales
    blocks = np.zeros((2, layout.block_bytes), np.uint8)
    layout.scales(blocks)[1, scales - 1] = -0.0
    layout.rows(blocks)[0, 7] = 9
    assert np.flatnonzero(blocks[1]).tolist() == [layout.block_bytes - 1]
    assert np.flatnonzero(blocks[0]).tolist() == list(range(7 * 50, 7 * 50 + 48))
    assert layout.scale_bytes(blocks)[1, -1].tolist() == [0, 0, 0, 0x80]


@pytest.mark.parametrize("name", ["fp32", "fp8_e4m3", "fp8_ds_mla"])
def test_blocks_without_scales_of_their_own(name: str):
    """S-11: a block without separate scales is only its storage, and has 0 scales."""
    layout = layout_of(name)
    assert layout.block_bytes == layout.block_stride
    blocks = np.zeros((3, layout.block_bytes), np.uint8)
    assert layout.scales(blocks).shape == (3, 0)
    assert layout.scale_bytes(blocks).shape == (3, 0, 4)


def test_fields_can_be_written():
    """S-11: a field of a row of fp8_ds_mla is written at its unaligned place."""
    layout = layout_of("fp8_ds_mla", token_padding=1)
    blocks = np.zeros((1, layout.block_bytes), np.uint8)
    layout.field(blocks, "k_pe")[0, 1, 0] = -0.0
    [at] = np.flatnonzero(blocks[0])
    assert at == layout.token_stride + 32 + 4 * 4 + 1


def test_blocks_that_are_not_listed_are_poison_with_their_scales():
    """S-9: the pattern starts again at the scales, for any length of the storage."""
    layout = layout_of("fp8_block_group", block_padding=3)
    image = CacheImage.without_blocks(layout, np.array([1, 2, 3], np.uint8))
    [block] = image.read(np.array([4]))
    assert block[: layout.block_stride].tolist() == [1, 2, 3] * (layout.block_stride // 3)
    assert block[layout.block_stride :].tolist() == [1, 2, 3] * 5 + [1]


@pytest.mark.parametrize("name", FORMATS)
def test_poison_is_nan_and_huge_in_every_format(name: str):
    """S-9: rows of live blocks are alternately NaN and huge, and no scale is a usual number."""
    layout = layout_of(name, token_padding=8)
    image = poisoned_image(layout, np.array([1, 2]))
    for field in layout.format.fields(layout.dims):
        values = layout.field(image.blocks, field.name).astype(np.float32)
        assert np.isnan(values[:, ::2]).all()
        assert (values[:, 1::2] >= (448 if "8" in field.dtype else 6e4)).all()
    scales = layout.scales(image.read(np.arange(5)))
    assert not (np.abs(scales) < 1e20).any()


def test_poison_of_a_mixed_row():
    """S-9: 512 e4m3, 4 scales and 64 bfloat16, each NaN or as large as 1e30 in its own type."""
    layout = CacheLayout(FORMATS["fp8_ds_mla"], DEEPSEEK_V3, 2, 1)
    blocks = poisoned_image(layout, np.array([0])).blocks
    scales = layout.field(blocks, "ckv_scale")[0]
    assert np.isnan(scales[0]).all()
    assert (scales[1] == np.float32(1e30)).all()
    assert set(layout.field(blocks, "ckv")[0, 1].astype(np.float32)) == {448.0}
