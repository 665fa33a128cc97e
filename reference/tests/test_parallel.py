"""A context divided over ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import causal, loops, request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append, write_slots
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.parallel import ContextParallel, attend_rank, rank_batch
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Mask, Rope, RopePairing

GROUPS = st.builds(ContextParallel, world=st.integers(1, 5), interleave=st.integers(1, 4))


def test_owners_by_hand():
    """S-18: 2 ranks, 3 tokens each in turn."""
    owners = ContextParallel(2, 3).owner(np.arange(10))
    assert owners.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1]


def test_local_lengths_by_hand():
    """S-18: 8 tokens over 3 ranks, 2 in turn: 4, 2 and 2; 1 token: ranks 1 and 2 hold none."""
    group = ContextParallel(3, 2)
    assert [group.local_len(8, rank) for rank in range(3)] == [4, 2, 2]
    assert [group.local_len(1, rank) for rank in range(3)] == [1, 0, 0]


@settings(derandomize=True, deadline=None, max_examples=80)
@given(group=GROUPS, seq_len=st.integers(0, 60))
def test_formulas_count_the_positions_of_owners(group, seq_len):
    """S-18: local lengths and positions follow from the owner of every position."""
    owners = group.owner(np.arange(seq_len))
    for rank in range(group.world):
        mine = np.flatnonzero(owners == rank).tolist()
        assert group.local_positions(seq_len, rank).tolist() == mine
        assert group.local_len(seq_len, rank) == len(mine)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(group=GROUPS, context=st.integers(0, 9), seed=st.integers(0, 99))
def test_ranks_merge_to_the_whole(group, context, seed):
    """S-8, S-18: merging what each rank sees, ranks without keys too, is plain attention."""
    one = request(context + 3, seed)
    made = scene([one], [context])
    partials = [
        attend_rank(made.problem, made.batch, made.image, group, rank, rounding=Rounding.EXACT)
        for rank in range(group.world)
    ]
    merged = merge([partial.output("float32") for partial in partials])
    out, lse = loops(one, range(context, context + 3), causal)
    np.testing.assert_allclose(merged.out, out, atol=1e-5)
    np.testing.assert_allclose(merged.lse, lse, atol=1e-5)


@pytest.mark.parametrize("mask", [Mask.CAUSAL, Mask.NON_CAUSAL])
def test_a_rank_without_keys(mask):
    """S-6, S-18: 2 tokens over 4 ranks: the last two return (0, -inf)."""
    made = scene([request(2, 1)], [1], mask=mask)
    for rank in (2, 3):
        answer = attend_rank(made.problem, made.batch, made.image, ContextParallel(4), rank)
        assert not answer.out.any()
        assert np.isneginf(answer.lse).all()


def test_a_rank_does_not_rotate():
    """S-12, S-18: a rank counts its own keys, so it does not know the positions to rotate at."""
    made = scene([request(3, 1)], [0])
    problem = replace(made.problem, rope=Rope(RopePairing.NEOX))
    with pytest.raises(InvalidArgument, match="rope"):
        rank_batch(problem, made.batch, ContextParallel(2), 0)


def test_the_largest_group():
    """S-18: 1024 ranks are legal; ``test_simulator_engine.py`` tests illegal groups."""
    assert ContextParallel(1024).local_len(1025, 0) == 2


def test_rows_of_a_rank_by_hand():
    """S-2, S-18: of 2 ranks that take turns: a row of 1 token, a padded row, a chunk behind 4."""
    made = scene([request(1, 1), request(1, 2), request(6, 3)], [0, 0, 4], block_size=8)
    lengths = made.batch.seq_lens.copy()
    lengths[1] = 0
    batch = replace(made.batch, seq_lens=lengths)
    first, last = made.batch.block_table[[0, 2], 0].astype(np.int64) * 4
    local = replace(made.problem, block_size=4)
    ranks = [rank_batch(local, batch, ContextParallel(2), rank) for rank in (0, 1)]
    assert [rank.seq_lens.tolist() for rank in ranks] == [[1, 0, 3, 3], [0, 0, 2, 3]]
    assert ranks[0].slot_mapping.tolist() == [first, -1, last + 2, -1]
    assert ranks[1].slot_mapping.tolist() == [-1, -1, -1, last + 2]
    assert ranks[0].block_table[1].tolist() == [-1] * 70


@settings(derandomize=True, deadline=None, max_examples=25)
@given(interleave=st.sampled_from([1, 2, 4]), world=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_rank_of_its_own(interleave, world, seed):
    """S-18: a rank's batch on its local cache is its share of the undivided one."""
    group = ContextParallel(world, interleave)
    one = request(11, seed)
    made = scene([one], [7], block_size=4 * world)
    local = replace(made.problem, block_size=4, max_rows=4)
    for rank in range(world):
        batch = rank_batch(local, made.batch, group, rank)
        mine = group.local_positions(7, rank)
        slots = made.batch.block_table[0, mine // (4 * world)] * 4 + np.arange(len(mine)) % 4
        image = CacheImage.without_blocks(local.layout, np.zeros(4, np.uint8))
        image = write_slots(image, slots.astype(np.int64), one.ckv[mine], one.k_pe[mine])
        image = append(local, batch, image)
        validate_batch(local, batch)
        answer = attend(local, batch, image, Rounding.EXACT)
        share = attend_rank(
            made.problem, made.batch, made.image, group, rank, rounding=Rounding.EXACT
        )
        np.testing.assert_allclose(answer.out, share.out, atol=1e-12)
        np.testing.assert_allclose(answer.lse, share.lse, atol=1e-12)
