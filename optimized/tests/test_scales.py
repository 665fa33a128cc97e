"""Lost scales of FP8 caches: `check` reports them if a step reads them (S-9, S-11)."""

import pytest
import torch
from fp8_step import NAMES, SHARES, build_fp8
from mla_step import R

from paged_mla_optimized import LatentCache, PagedMla
from paged_mla_shared.errors import InvalidArgument

ROWS = ((20, 1), (0, 0), (40, 3))
LOST = [0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")]
INSIDE = slice(R, R + 4 * SHARES)  # where a row of fp8_ds_mla has its scales


def step_of(name):
    """Return a step whose cache has no scale but those of its rows' keys: NaN elsewhere."""
    return build_fp8(name, *ROWS, block_size=16)


def check(step, **given):
    PagedMla(step.config, "cpu").check(step.described, cache=step.cache, **given)


def lose(step, row, position, value, part=2):
    """Overwrite the scale of a row's token with an invalid value."""
    cache, size = step.cache, step.config.block_size
    block, token = int(step.block_table[row, position // size]), position % size
    if step.config.cache_format == "fp8_e4m3":
        cache.scales.fill_(value)
    elif cache.scales is None:
        cache.latents[block, token, INSIDE].view(torch.float32)[part] = value
    else:
        groups = cache.scales.shape[2]
        cache.scales[block, 0, token * groups // size] = value
    return block, token


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_what_is_read_are_there(name):
    """S-9: nothing else is looked at, and not the tokens of this step, which come only now."""
    step = step_of(name)
    check(step)
    if name == "fp8_block_token":
        lose(step, 2, 37, 0.0)
        check(step)


@pytest.mark.parametrize("value", LOST)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("row", "position"), [(0, 0), (2, 36)], ids=["first", "last"])
def test_lost_scales_are_named(name, row, position, value):
    """S-11: of any cached token, with its slot, its block and a row that reads it."""
    step = step_of(name)
    block, token = lose(step, row, position, value)
    with pytest.raises(InvalidArgument) as error:
        check(step)
    assert error.value.argument == "cache.scales"
    if name == "fp8_e4m3":
        assert "for the layer" in str(error.value)
    else:
        token -= token % 4 if name == "fp8_block_group" else 0
        assert f"slot {block * 16 + token} in block {block}, which row {row} " in str(error.value)


def test_a_scale_of_any_part_of_a_latent_counts():
    """S-11: `fp8_ds_mla` keeps four in each row."""
    for part in range(SHARES):
        step = step_of("fp8_ds_mla")
        lose(step, 0, 5, 0.0, part)
        with pytest.raises(InvalidArgument, match=f"part {part} of the latent"):
            check(step)


def test_plain_caches_have_none():
    """S-11: a cache without scales is held against its blocks alone."""
    step = build_fp8("fp8_e4m3", *ROWS)
    plain = step.cache.latents.new_zeros((2, 16, 48)).float()
    mla = PagedMla(step.config.__class__(**vars(step.config) | {"cache_format": "fp32"}), "cpu")
    with pytest.raises(InvalidArgument, match=r"^block_table: .*allowed: 0 to 1$"):
        mla.check(step.described, cache=plain)


def test_the_cache_and_the_number_of_its_blocks_agree():
    """S-1: one of them is enough; both are the same."""
    step = step_of("fp8_e4m3")
    check(step, num_blocks=len(step.cache.latents))
    for wrong in (0, 1):
        with pytest.raises(InvalidArgument, match="num_blocks"):
            check(step, num_blocks=wrong)
    other = LatentCache("fp8_block_token", *step.cache[1:])
    with pytest.raises(InvalidArgument, match=r"cache: got format"):
        PagedMla(step.config, "cpu").check(step.described, cache=other)
