import pytest

from paged_mla_optimized.planning.families import (
    INTERPRETER,
    SHARED_MEMORY,
    attend_variant,
    tile_variants,
)

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_key_tiles_in_flight_fit_shared_memory(arch, dtype):
    """Queries, and a key tile for each stage but the one that loads, at R 512 and P 64."""
    for tile in tile_variants(arch, dtype):
        rows = tile.tile_m + tile.tile_n * max(tile.num_stages - 1, 1)
        assert rows * 576 * ITEMSIZE[dtype] <= SHARED_MEMORY[arch]


@pytest.mark.parametrize("arch", [*SHARED_MEMORY, INTERPRETER])
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_problem_has_a_variant(arch, dtype):
    """Tiles are powers of two from 16, and the grid is never empty."""
    for num_heads in (1, 6, 16, 17, 64, 96, 128):
        for query_len in (1, 4, 4096):
            variant = attend_variant(arch, dtype, num_heads, query_len)
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
    variant = attend_variant("sm90", "bfloat16", num_heads, query_len)
    assert (variant.tile_m, variant.lanes) == (tile_m, lanes)
