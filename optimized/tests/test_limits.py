"""Every size has a largest value, which is accepted; one more is refused before any allocation."""

from functools import partial

import numpy as np
import pytest
import torch
from mla_step import config

from paged_mla_optimized import (
    Bucket,
    DraftSteps,
    ExtendWindow,
    LayerConfig,
    PrefillConfig,
    StepInputs,
)
from paged_mla_optimized.parallel.sharding import local_config
from paged_mla_shared.errors import InvalidArgument


def prefill_config(**changes):
    sizes = {"num_heads": 1, "max_rows": 1, "max_tokens": 1}
    return PrefillConfig(softmax_scale=1.0, **sizes | changes)


def layer_config(**changes):
    return LayerConfig(attention=config(), **changes)


def drafts(**changes):
    sizes = {"max_requests": 1, "branches": 1, "steps": 1, "prefix_width": 1, "own_width": 1}
    return DraftSteps(**sizes | {"block_size": 1, "device": "meta"} | changes)


def window(**changes):
    return ExtendWindow(**{"max_rows": 1, "window": 1, "device": "meta"} | changes)


def step_inputs(**changes):
    return StepInputs(config(), "meta", {}, **changes)


def bucket(**changes):
    return Bucket(**{"tokens": 1, "rows": 1} | changes)


def local_of(world, **changes):
    return local_config(config(**changes), world=world, interleave=1)


tree = partial(config, mask="tree:qlen", max_draft_tokens=1)
built_table = partial(config, table_multiple=1)
drafts_with_room = partial(drafts, own_width=2**16)
LARGEST = [
    (config, "num_heads", 128),
    (config, "block_size", 2**15),
    (config, "max_rows", 2**15 - 2),
    (config, "max_query_tokens", 2**23),
    (config, "max_model_len", 2**30),
    (tree, "max_draft_tokens", 1024),
    (config, "table_multiple", 2**20),
    (config, "reserved_slot", 2**63 - 1),
    (built_table, "table_fill", 2**31 - 1),
    (prefill_config, "num_heads", 128),
    (prefill_config, "max_rows", 2**15 - 2),
    (prefill_config, "max_tokens", 2**23),
    (layer_config, "workspace_tokens", 2**30),
    (drafts, "max_requests", 2**15 - 2),
    (drafts, "branches", 2**15 - 2),
    (partial(drafts, max_requests=1024), "branches", 31),
    (drafts_with_room, "steps", 2**16),
    (drafts, "own_width", 2**16),
    (drafts, "prefix_width", 512 * 65535 - 1),
    (drafts, "block_size", 2**15),
    (window, "max_rows", 2**15 - 2),
    (window, "window", 2**23),
    (partial(window, max_rows=4), "window", 2**21),
    (step_inputs, "table_width", 2**30),
    (step_inputs, "pad_seq_len", 1),
    (step_inputs, "pad_block", 2**31 - 1),
    (bucket, "tokens", 2**23),
    (bucket, "rows", 2**15 - 2),
    (bucket, "max_query_len", 2**23),
    (partial(local_of, 2), "max_query_tokens", 2**15 - 2),
    (partial(local_of, 3), "num_heads", 126),
    (partial(local_of, 8), "num_heads", 128),
]
SIZES = pytest.mark.parametrize(("make", "name", "largest"), LARGEST)


@SIZES
def test_one_more_than_the_largest_size_is_refused(make, name, largest):
    make(**{name: largest})
    make(**{name: np.int64(largest)})
    with pytest.raises(InvalidArgument) as refused:
        make(**{name: largest + 1})
    assert refused.value.argument == name
    assert f"got {largest + 1}; allowed: " in str(refused.value)


@SIZES
@pytest.mark.parametrize("given", [True, 1.0, "1", 2**64, -(2**31) - 1, float("nan")])
def test_what_is_no_integer_of_its_range_is_refused(make, name, largest, given):
    with pytest.raises(InvalidArgument) as refused:
        make(**{name: given})
    assert refused.value.argument == name
    assert largest > 0


@pytest.mark.parametrize("name", ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
@pytest.mark.parametrize("given", [True, 64.0, "64"])
def test_a_head_size_is_an_integer(name, given):
    with pytest.raises(InvalidArgument, match=name):
        prefill_config(**{name: given})


def test_no_context_is_too_long_for_a_tensor_of_the_steps_of_a_draft():
    """S-15: NumPy's integers do not wrap where two sizes are multiplied."""
    made = drafts(own_width=np.int32(2**16), block_size=np.int32(2**15))
    assert made.block_table.shape == torch.Size([1, 2**16 + 1])
