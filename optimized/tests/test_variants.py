"""Which kernel and which tiles a step gets; that they are right is for other tests to show."""

import itertools

import pytest

from paged_mla_optimized.config.architectures import INTERPRETER, SHARED_MEMORY
from paged_mla_optimized.planning.families import (
    FAMILIES,
    FEW,
    FEW_FP8,
    PORTABLE,
    TILE,
    TILE_EXACT,
    TILE_FP8,
    Demand,
    passed_over,
    portable_variant,
    serving_variant,
    tile_variants,
    variants_by_query_len,
)
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def demand(
    num_heads, arch="sm90", dtype="bfloat16", head_dims=(512, 64), cache_format=None,
    products="exact",
):  # fmt: skip
    return Demand(
        arch=arch,
        dtype=dtype,
        cache_format=cache_format or PLAIN_FORMAT_OF_DTYPE[dtype],
        products=products,
        num_heads=num_heads,
        head_dims=head_dims,
    )


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_key_tiles_in_flight_fit_shared_memory(arch, dtype):
    """Queries, and a key tile for each stage but the one that loads, at R 512 and P 64."""
    for tile in tile_variants(arch, dtype, PLAIN_FORMAT_OF_DTYPE[dtype]):
        rows = tile.tile_m + tile.tile_n * max(tile.num_stages - 1, 1)
        assert rows * 576 * ITEMSIZE[dtype] <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", [*SHARED_MEMORY, INTERPRETER])
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("choose", [serving_variant, portable_variant])
def test_every_step_has_a_variant(arch, dtype, choose):
    """Tiles are powers of two from 16, and the grid is never empty."""
    for num_heads in (1, 6, 16, 17, 64, 96, 128):
        for query_len in (1, 4, 4096):
            variant = choose(demand(num_heads, arch, dtype), query_len)
            for tile in (variant.tile_m, variant.tile_n):
                assert tile >= 16
                assert tile & (tile - 1) == 0
            assert variant.programs(num_sms=1) >= variant.lanes


@pytest.mark.parametrize(
    ("num_heads", "query_len", "tile_m", "lanes"),
    [
        (1, 1, 16, 1),
        (16, 1, 16, 1),
        (16, 2, 32, 1),
        (17, 1, 32, 1),
        (16, 4, 64, 1),
        (16, 512, 64, 1),
        (64, 1, 64, 1),
        (96, 1, 64, 2),
        (128, 8, 64, 2),
    ],
)
def test_query_tiles_are_as_high_as_the_queries(num_heads, query_len, tile_m, lanes):
    """No higher than needed, and side by side when one token fills several."""
    variant = portable_variant(demand(num_heads), query_len)
    assert (variant.tile_m, variant.lanes) == (tile_m, lanes)


@pytest.mark.parametrize(
    ("num_heads", "query_len", "family", "tile_m", "lanes"),
    [
        (6, 1, FEW, 16, 1),
        (20, 1, FEW, 32, 1),
        (40, 1, TILE, 64, 1),
        (16, 1, FEW, 16, 1),
        (16, 2, FEW, 32, 1),
        (32, 1, FEW, 32, 1),
        (24, 1, FEW, 32, 1),
        (16, 3, TILE, 64, 1),
        (16, 32, TILE, 64, 4),
        (128, 1, TILE, 64, 2),
        (128, 900, TILE, 64, 4),
    ],
)
def test_hopper_serves_by_the_pairs_of_a_row(num_heads, query_len, family, tile_m, lanes):
    """Up to 32 pairs of token and head go to one kernel, tiles of 64 to the other."""
    variant = serving_variant(demand(num_heads), query_len)
    assert (variant.family, variant.tile_m, variant.lanes) == (family, tile_m, lanes)


FAST = {"cache_format": "fp8_e4m3", "products": "fast"}


@pytest.mark.parametrize(
    ("num_heads", "query_len", "lanes"), [(16, 4, 1), (64, 1, 1), (128, 1, 2), (128, 2, 4)]
)
def test_fast_products_have_a_kernel(num_heads, query_len, lanes):
    """On Hopper, where all of a row is e4m3 and the config allows FP8 products."""
    formats = ("fp8_e4m3", "fp8_block_token", "fp8_block_group")
    for dtype, name in itertools.product(("bfloat16", "float16"), formats):
        asked = demand(num_heads, dtype=dtype, **FAST | {"cache_format": name})
        variant = serving_variant(asked, query_len)
        assert (variant.family, variant.tile_m, variant.lanes) == (TILE_FP8, 64, lanes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (demand(128, cache_format="fp8_e4m3"), "rounds to FP8, where products are exact"),
        (
            demand(128, products="fast"),
            "made for fp8_e4m3, fp8_block_token, fp8_block_group caches, not cache_format bf16",
        ),
        (demand(128, **FAST | {"cache_format": "fp8_ds_mla"}), "not cache_format fp8_ds_mla"),
        (demand(128, arch="sm100", **FAST), "sm90, not sm100"),
        (demand(128, dtype="float32", **FAST), "not float32"),
        (demand(128, head_dims=(256, 64), **FAST), "not 256 and 64"),
    ],
    ids=["exact", "plain-cache", "other-scales", "sm100", "fp32", "rank"],
)
def test_fast_products_are_only_where_they_fit(asked, reason):
    """Other requirements never use that kernel, and have a reason."""
    assert serving_variant(asked, 1).family != TILE_FP8
    assert reason in FAMILIES[TILE_FP8].misfit(asked, 128)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (demand(16, arch="sm80"), "sm90, not sm80"),
        (demand(16, arch="sm100"), "sm90, not sm100"),
        (demand(16, dtype="float32"), "not float32"),
        (demand(16, head_dims=(128, 64)), "not 128 and 64"),
        (demand(16, head_dims=(512, 32)), "not 512 and 32"),
        (demand(16, arch="sm89", cache_format="fp8_e4m3"), "sm90, not sm89"),
        (demand(16, head_dims=(256, 64), cache_format="fp8_e4m3"), "not 256 and 64"),
    ],
    ids=["sm80", "sm100", "fp32", "rank", "rope-dim", "fp8-sm89", "fp8-rank"],
)
def test_portable_serves_the_rest(asked, reason):
    """What the Gluon kernels cannot do is never sent to them, and has a reason."""
    assert serving_variant(asked, 1).family == PORTABLE
    for family in (FEW_FP8,) if asked.cache_format == "fp8_e4m3" else (FEW, TILE):
        assert reason in passed_over(asked, 1)[family]


FP8_FORMATS = [name for name, stored in FORMATS.items() if not stored.is_plain]


@pytest.mark.parametrize("cache_format", FP8_FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_products_have_a_kernel_for_e4m3(dtype, cache_format):
    """For any number of pairs of token and head, and for both dtypes of queries."""
    asked = demand(16, dtype=dtype, cache_format=cache_format)
    found = [serving_variant(asked, query_len) for query_len in (1, 2, 3, 4, 5, 16)]
    lacks_room = FORMATS[cache_format].inline_scales and dtype == "float16"
    many, lanes = (FEW_FP8, 2) if lacks_room else (TILE_EXACT, 4)
    assert [v.family for v in found] == [FEW_FP8] * 2 + [many] * 4
    assert [(v.tile_m, v.lanes) for v in found] == [
        (16, 1), (32, 1), (64, 1), (64, 1), (64, 2), (64, lanes),
    ]  # fmt: skip
    reasons = passed_over(asked, 5)
    assert reasons[TILE] == f"made for bf16, fp16 caches, not cache_format {cache_format}"


def test_tiles_of_64_are_faster_for_more_than_32_pairs():
    """If their shared memory suffices; the kernel for few queries reports it as the reason."""
    asked = demand(16, cache_format="fp8_ds_mla")
    assert FEW_FP8 not in passed_over(asked, 2)
    reason = passed_over(asked, 3)[FEW_FP8]
    assert reason == "slower than tiles of 64 for 48 pairs of token and head"
    asked = demand(16, cache_format="fp8_ds_mla", dtype="float16")
    assert "in addition to queries of float16" in FAMILIES[TILE_EXACT].misfit(asked, 48)


def test_fast_products_of_shares_of_a_latent_are_exact_ones():
    """FP8 products take one scale for a key's whole row: others are served exactly."""
    asked = demand(128, cache_format="fp8_ds_mla", products="fast")
    assert serving_variant(asked, 1).family == TILE_EXACT


def test_fast_products_leave_16_pairs_to_exact_ones():
    """Where memory limits both, FP8 products win nothing."""
    asked = demand(16, **FAST)
    assert serving_variant(asked, 1).family == FEW_FP8
    assert serving_variant(asked, 2).family == TILE_FP8
    reason = passed_over(asked, 2)[FEW_FP8]
    assert reason == "slower than FP8 products for 32 pairs of token and head"


def test_half_the_latents_have_a_kernel_for_few_queries():
    """With (256, 64), the dims of Mistral Small 4, more than 32 pairs use the portable kernel."""
    assert serving_variant(demand(32, head_dims=(256, 64)), 1).family == FEW
    assert serving_variant(demand(32, head_dims=(256, 64)), 2).family == PORTABLE
    assert "kv_lora_rank 512 and" in passed_over(demand(32, head_dims=(256, 64)), 2)[TILE]


def test_what_is_passed_over_has_a_reason():
    """If a faster kernel fits no step of this length, there is a reason."""
    assert passed_over(demand(16), 2) == {}
    assert passed_over(demand(16), 3) == {FEW: "serves at most 32 pairs of token and head"}


@pytest.mark.parametrize("num_heads", [1, 5, 16, 128])
def test_longer_queries_get_what_the_longest_known_gets(num_heads):
    """Past the last length that is looked up, no family takes other tiles."""
    found = variants_by_query_len(demand(num_heads), 100_000)
    for length in (*range(1, len(found) + 1), 2 * len(found), 8192):
        expected = serving_variant(demand(num_heads), length)
        assert found[min(length, len(found)) - 1] == expected
