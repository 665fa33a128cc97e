"""The step chooses its kernel: what the host knows of it, not what its instance could hold."""

from dataclasses import replace

import pytest
import torch
from mla_step import assert_close, build, config, dense

from paged_mla_optimized import MlaConfig, PagedMla
from paged_mla_optimized.planning.choice import demand_of, step_query_len
from paged_mla_optimized.planning.families import FEW, TILE, AttendVariant, serving_variant
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

README_SIZED = MlaConfig(
    num_heads=16,
    softmax_scale=0.1,
    block_size=64,
    max_rows=256,
    max_query_tokens=1024,
    max_model_len=131072,
)
BATCH_INVARIANT = replace(README_SIZED, batch_invariant=True)
TREE = replace(README_SIZED, mask="tree:qlen", max_draft_tokens=5)


@pytest.mark.parametrize(
    ("instance", "rows", "tokens", "told", "expected"),
    [
        (README_SIZED, 8, 8, None, 1),
        (README_SIZED, 256, 100, None, 1),
        (README_SIZED, 17, 34, None, 1024),
        (README_SIZED, 17, 34, 2, 2),
        (README_SIZED, 101, 1000, None, 1024),
        (README_SIZED, 8, 8, 900, 900),
        (TREE, 8, 8, None, 5),
        (TREE, 8, 40, 3, 3),
        (BATCH_INVARIANT, 8, 8, None, 1024),
        (BATCH_INVARIANT, 8, 8, 1, 1),
        (replace(BATCH_INVARIANT, max_query_tokens=256), 8, 100, None, 1),
    ],
)
def test_query_length_of_tiles_follows_from_the_step(instance, rows, tokens, told, expected):
    """The step's value; else decode if no row needs more than a token; constant if invariant."""
    assert step_query_len(instance, rows, tokens, told) == expected


@pytest.mark.parametrize("told", [0, -1])
def test_a_query_length_below_one_is_refused(told):
    """An argument with a value that means nothing has an error with its name."""
    mla, step = PagedMla(config(), "cpu"), build((20, 1))
    with pytest.raises(InvalidArgument, match=r"max_query_len.*>= 1"):
        mla.plan(
            MlaStep(
                step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=1, max_query_len=told
            )
        )


@pytest.mark.parametrize(
    ("rows", "tokens", "told", "family", "tile_m"),
    [
        (8, 8, None, FEW, 16),
        (17, 34, 2, FEW, 32),
        (17, 34, None, TILE, 64),
        (101, 1000, None, TILE, 64),
    ],
    ids=["decode", "two-tokens", "unknown", "mixed"],
)
def test_one_instance_has_a_kernel_for_each_step(rows, tokens, told, family, tile_m):
    """S-20: capacities decide nothing."""
    length = step_query_len(README_SIZED, rows, tokens, told)
    variant = serving_variant(demand_of(README_SIZED, "sm90"), length)
    assert (variant.family, variant.tile_m) == (family, tile_m)


STEPS = (
    (((90, 1), (1, 1), (200, 1)), None),
    (((90, 3), (33, 33), (0, 2), (70, 1)), None),
    (((90, 2), (40, 2)), 2),
    (((90, 7), (5, 1)), 1),  # longer than was told
    (((70, 1), (130, 1)), 64),
)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
def test_one_instance_serves_every_step(batch_invariant):
    """S-17, S-20: steps of every kind follow each other in the buffers of one instance."""
    mla = PagedMla(config(num_heads=12, batch_invariant=batch_invariant), "cpu")
    chosen = set()
    for rows, told in (*STEPS, *STEPS[::-1]):
        step = build(*rows, num_heads=12)
        mla.workspace.fill_(torch.nan)
        found = step.attend(mla, max_query_len=told)
        assert_close(found, dense(step))
        chosen.add(mla._core.plan.host.choice)
        fresh = step.attend(
            PagedMla(config(num_heads=12, batch_invariant=batch_invariant), "cpu"),
            max_query_len=told,
        )
        for mine, theirs in zip(found, fresh, strict=True):
            assert torch.equal(mine, theirs)
    assert len(chosen) == 3


def test_a_variant_given_serves_every_step():
    """For tests and benchmarks: no step chooses."""
    tiles = AttendVariant(tile_m=16, tile_n=16, num_warps=1, num_stages=1)
    mla = PagedMla(config(), "cpu", variant=tiles)
    for rows, told in STEPS[:3]:
        step = build(*rows)
        assert_close(step.attend(mla, max_query_len=told), dense(step))
    assert mla._core.variants == [tiles]


@pytest.mark.parametrize("inside", [True, False], ids=["plan-compiled", "plan-eager"])
def test_a_compiled_step_chooses_as_it_would(inside):
    """S-17: the ops get the step's value, no matter where the step was planned."""
    step = build((90, 2), (40, 2), num_heads=12)
    mla = PagedMla(step.config, "cpu")
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)

    def run(q_nope, q_pe, cache):
        if inside:
            mla.plan(MlaStep(*lengths, num_tokens=4, max_query_len=2))
        return mla.attend(q_nope, q_pe, cache)

    if not inside:
        mla.plan(MlaStep(*lengths, num_tokens=4, max_query_len=2))
    mla.workspace.fill_(torch.nan)
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(
        step.q_nope, step.q_pe, step.cache
    )
    eager = step.attend(PagedMla(step.config, "cpu"), max_query_len=2)
    for mine, theirs in zip(found, eager, strict=True):
        assert torch.equal(mine, theirs)
