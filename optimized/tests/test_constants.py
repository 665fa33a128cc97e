"""What kernels are compiled for: dims, tiles and masks, never how much an instance can hold."""

from dataclasses import replace

import pytest

from paged_mla_optimized import MlaConfig
from paged_mla_optimized.operations.attend.combine import combine_spec
from paged_mla_optimized.operations.attend.hopper import hopper_spec
from paged_mla_optimized.operations.attend.portable import attend_spec
from paged_mla_optimized.planning.choice import demand_of
from paged_mla_optimized.planning.families import serving_variant

SMALL = MlaConfig(
    num_heads=16,
    softmax_scale=0.1,
    block_size=64,
    max_rows=3,
    max_query_tokens=8,
    max_model_len=1000,
)
CAPACITIES = ({"max_rows": 300}, {"max_query_tokens": 4096}, {"max_model_len": 131072})


@pytest.mark.parametrize("change", CAPACITIES, ids=str)
@pytest.mark.parametrize("query_len", [1, 2, 8])
def test_capacities_compile_nothing_again(change, query_len):
    """S-20: instances of one model share their kernels, however large each is."""

    def specs(config):
        variant = serving_variant(demand_of(config, "sm90"), query_len)
        return (
            attend_spec(config, variant, "sm90"),
            combine_spec(config, variant),
            hopper_spec(config, variant, 64, 576),
        )

    assert specs(replace(SMALL, **change)) == specs(SMALL)


def test_fixed_splits_come_in_few_kinds():
    """S-20: rows of fixed splits are cut for capacities, in powers of two."""
    variant = serving_variant(demand_of(SMALL, "sm90"), 1)
    kinds = {
        attend_spec(replace(SMALL, batch_invariant=True, max_rows=n), variant, "sm90").constants[
            "FIXED_SPLITS"
        ]
        for n in range(1, 1025)
    }
    assert len(kinds) <= 12
