"""Slots, context lengths, positions: numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import problem_of, request, scene

from paged_mla_reference.rules.paging import blocks_of, context_lens, slots_of, used_blocks
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.problem import Mask

A_TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)


@pytest.mark.parametrize(
    ("position", "slot"),
    [(0, 28), (3, 31), (4, 8), (7, 11), (8, 36), (9, 37)],
)
def test_slot_of_a_position(position, slot):
    """S-1: block_table[p // 4] * 4 + p % 4 with blocks 7, 2, 9."""
    assert slots_of(np.array([7, 2, 9], np.int32), np.array([position]), 4) == [slot]


def test_block_size_one():
    """S-1: with one token per block a slot is a block id."""
    table = np.array([5, 0, 3], np.int32)
    assert slots_of(table, np.arange(3), 1).tolist() == [5, 0, 3]


def test_slots_are_64_bit():
    """S-1: a 32-bit block id times the block size passes 2^31."""
    slot = slots_of(np.array([2**30], np.int32), np.array([255]), 256)
    assert slot.dtype == np.int64
    assert slot.tolist() == [2**38 + 255]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_of_a_length(tokens, blocks):
    """S-1: ceil(seq_len / block_size)."""
    assert blocks_of(tokens, 4) == blocks


def test_only_blocks_of_tokens_are_used():
    """S-9: entries past ceil(seq_len / block_size) are not looked at."""
    made = scene([request(5, 1)], [4])
    assert len(used_blocks(made.batch, 0, 4)) == 2
    assert (made.batch.block_table[0, 2:] == 2**31 - 1).all()


def test_context_lengths():
    """S-2: seq_len - query_len; 0 for a padded row with any number of queries."""
    made = scene([request(5, 1), request(3, 2), request(7, 3)], [4, 0, 7])
    assert context_lens(made.batch).tolist() == [4, 0, 7]
    padded = replace(made.batch, seq_lens=np.array([5, 0, 7], np.int32))
    assert context_lens(padded).tolist() == [4, 0, 7]
    short = replace(made.batch, seq_lens=np.array([5, 1, 7], np.int32))
    assert context_lens(short).tolist() == [4, 0, 7]


def _metadata_of(cu_seqlens_q, seq_lens, table, tokens, *, tree=None, **problem):
    made = scene([request(tokens, 1)], [0])
    batch = replace(
        made.batch,
        cu_seqlens_q=np.array(cu_seqlens_q, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        block_table=np.array(table, np.int32),
        mask=tree,
    )
    return metadata(problem_of(**problem), batch)


def test_positions_and_slots_of_a_mixed_step():
    """S-3: a decode token, a fresh prompt and a continued chunk count from their own context."""
    found = _metadata_of([0, 1, 4, 6], [6, 3, 9], [[3, 1, -1], [0, -1, -1], [5, 2, 4]], 6)
    assert found.positions.tolist() == [5, 0, 1, 2, 7, 8]
    assert found.slot_mapping.tolist() == [1 * 4 + 1, 0, 1, 2, 2 * 4 + 3, 4 * 4 + 0]


def test_padding_has_no_position_and_no_slot():
    """S-2, S-6: rows of length 0 and tokens past the last row get position 0 and slot -1."""
    found = _metadata_of([0, 2, 2, 3], [0, 6, 6], [[9, 9], [1, 2], [3, 4]], 5)
    assert found.positions.tolist() == [0, 0, 5, 0, 0]
    assert found.slot_mapping.tolist() == [-1, -1, 4 * 4 + 1, -1, -1]


def test_queries_in_front_of_a_row_have_no_position_and_no_slot():
    """S-2, S-3: of 3 queries at 1 key the last one has its slot; of 5 at 4, the last four."""
    found = _metadata_of([0, 3, 8, 9], [1, 4, 6], [[5, 9], [2, 9], [7, 1]], 9, mask=Mask.NON_CAUSAL)
    assert found.positions.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 5]
    assert found.slot_mapping.tolist() == [-1, -1, 20, -1, 8, 9, 10, 11, 5]


def test_tree_positions_follow_depth_and_slots_the_index():
    """S-3: siblings 1 and 2 share position 4, and every node has a slot of its own."""
    found = _metadata_of(
        [0, 4], [7], [[1, 0]], 4, mask=Mask.TREE, max_draft_tokens=4, tree=A_TREE.ravel()
    )
    assert found.positions.tolist() == [3, 4, 4, 5]
    assert found.slot_mapping.tolist() == [7, 0, 1, 2]


def test_explicit_slots_do_not_change_metadata():
    """S-3: metadata depends only on lengths and tables, for any explicit slots."""
    made = scene([request(6, 1)], [4])
    named = replace(made.batch, slot_mapping=np.array([0, 1]))
    derived = metadata(made.problem, made.batch)
    assert metadata(made.problem, named).slot_mapping.tolist() == derived.slot_mapping.tolist()
