"""Steps that no rule allows, and the legal ones that a bounded backend takes them for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.bounded import has_meaning, legal_rows, planned_as, taken_as
from paged_mla_reference.rules.masks import decode_mask, spell_mask
from paged_mla_reference.rules.paging import used_blocks
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask, MaskSpelling

FORK = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
MOST, LEAST = 2**31 - 1, -(2**31)
LENGTHS = (("cu_seqlens_q", 4), ("seq_lens", 3))


def _i32(*values):
    return np.array(values, np.int32)


def _step(mask=Mask.CAUSAL, spelling=MaskSpelling.QLEN, columns=4):
    """Rows of 6, 3 and 5 tokens, 3, 3 and 1 of them new; blocks of 4, named slots none."""
    made = scene([request(6, 1), request(3, 2), request(5, 3)], [3, 0, 4], mask=mask)
    problem = replace(made.problem, mask_spelling=spelling, max_draft_tokens=0)
    batch = replace(made.batch, block_table=made.batch.block_table[:, :columns])
    if mask is Mask.TREE:
        problem = replace(problem, max_draft_tokens=4)
        trees = [FORK, FORK, np.eye(1, dtype=bool)]
        batch = replace(batch, mask=spell_mask(trees, spelling, batch.seq_lens, 4))
    return replace(made, problem=problem, batch=batch)


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("spelling", MaskSpelling)
def test_a_legal_step_is_taken_as_it_is(mask, spelling):
    """S-1, S-2, S-14: every row is served, and the step names the slots it has."""
    made = _step(mask, spelling)
    taken = taken_as(made.problem, made.batch)
    assert legal_rows(made.problem, made.batch).all()
    assert has_meaning(made.problem, made.batch).all()
    for name in ("cu_seqlens_q", "seq_lens", "mask"):
        assert np.array_equal(getattr(taken, name), getattr(made.batch, name))
    assert np.array_equal(taken.slot_mapping, metadata(made.problem, made.batch).slot_mapping)
    for row, used in enumerate((2, 1, 2)):
        assert np.array_equal(taken.block_table[row, :used], made.batch.block_table[row, :used])


@pytest.mark.parametrize(
    ("cu_seqlens_q", "seq_lens", "legal"),
    [
        ((0, 3, 6, 7), (6, 2, 5), (1, 0, 1)),
        ((0, 3, 6, 7), (6, -1, 5), (1, 0, 1)),
        ((0, 3, 6, 7), (LEAST, 3, 5), (0, 1, 1)),
        ((0, 3, 6, 7), (6, 3, 17), (1, 1, 0)),
        ((0, 3, 6, 7), (6, 3, 16), (1, 1, 1)),
        ((0, 3, 6, 7), (6, 3, MOST), (1, 1, 0)),
        ((0, 3, 6, 7), (0, 3, 0), (1, 1, 1)),
        ((-2, 3, 6, 7), (6, 3, 5), (0, 1, 1)),
        ((LEAST, 3, 6, 7), (6, 3, 5), (0, 1, 1)),
        ((0, -1, 6, 7), (6, 7, 5), (0, 0, 1)),
        ((2, 3, 6, 7), (6, 3, 5), (1, 1, 1)),
        ((0, 5, 4, 7), (6, 3, 5), (1, 0, 0)),
        ((0, 4, 3, 7), (6, 3, 5), (1, 0, 0)),
        ((0, 4, 3, 4), (6, 3, 5), (1, 0, 0)),
        ((0, MOST, 6, 7), (6, 3, 5), (0, 0, 0)),
        ((LEAST, MOST, 6, 7), (6, 3, 5), (0, 0, 0)),
        ((0, 3, 6, 9), (6, 3, 5), (1, 1, 1)),
    ],
)
def test_which_rows_are_served(cu_seqlens_q, seq_lens, legal):
    """S-2: rows in order and apart, of lengths that a model and the table have."""
    made = _step()
    problem = replace(made.problem, max_model_len=20)
    batch = replace(made.batch, cu_seqlens_q=_i32(*cu_seqlens_q), seq_lens=_i32(*seq_lens))
    assert legal_rows(problem, batch).tolist() == [bool(row) for row in legal]


def test_a_model_may_be_shorter_than_the_table():
    """S-2: max_model_len limits a row, for any number of table columns."""
    made = _step()
    problem = replace(made.problem, max_model_len=5)
    assert legal_rows(problem, made.batch).tolist() == [False, True, True]


def test_a_row_that_is_not_legal_becomes_padding_where_it_is():
    """S-2, S-6: of 3 queries at 2 keys; the rows around it keep tokens, slots and positions."""
    made = _step()
    short = replace(made.batch, seq_lens=_i32(6, 2, 5))
    with pytest.raises(InvalidArgument):
        validate_batch(made.problem, short)
    taken = taken_as(made.problem, short)
    validate_batch(made.problem, taken)
    assert taken.seq_lens.tolist() == [6, 0, 5]
    assert taken.cu_seqlens_q.tolist() == [0, 3, 6, 7]
    right, found = metadata(made.problem, made.batch), planned_as(made.problem, short)
    assert found.positions.tolist() == [3, 4, 5, 0, 0, 0, 4]
    assert found.slot_mapping[3:6].tolist() == [-1] * 3
    assert np.array_equal(found.slot_mapping[:3], right.slot_mapping[:3])
    answer = attend(made.problem, taken, made.image, Rounding.EXACT)
    whole = attend(made.problem, made.batch, made.image, Rounding.EXACT)
    assert not answer.out[3:6].any()
    assert np.isneginf(answer.lse[3:6]).all()
    for tokens in (slice(3), slice(6, 7)):
        assert np.array_equal(answer.out[tokens], whole.out[tokens])


@pytest.mark.parametrize(
    ("given", "expected", "seq_lens"),
    [
        ((-2, 3, 6, 7), (0, 3, 6, 7), (0, 3, 5)),
        ((2, 3, 6, 7), (0, 2, 3, 6, 7), (0, 6, 3, 5)),
        ((0, 4, 3, 7), (0, 4, 4, 4), (6, 0, 0)),
        ((0, -1, 6, 7), (0, 0, 6, 7), (0, 0, 5)),
        ((0, MOST, 6, 7), (0, 0, 0, 0), (0, 0, 0)),
    ],
)
def test_tokens_of_no_row_keep_their_places(given, expected, seq_lens):
    """S-2: tokens of no legal row belong to a row of length 0, or are behind the last row."""
    made = _step()
    taken = taken_as(made.problem, replace(made.batch, cu_seqlens_q=_i32(*given)))
    validate_batch(replace(made.problem, max_rows=9), taken)
    assert taken.cu_seqlens_q.tolist() == list(expected)
    assert taken.seq_lens.tolist() == list(seq_lens)


def test_a_row_that_reaches_past_the_tokens_is_cut():
    """S-3, S-4: 3 queries of 6 keys, of which 2 are there: they see what they saw."""
    made = _step()
    batch = made.batch
    last = replace(batch, cu_seqlens_q=_i32(0, 1, 4, 9), seq_lens=_i32(1, 3, 6))
    swapped = replace(last, block_table=batch.block_table[[2, 1, 0]])
    found = planned_as(made.problem, swapped)
    assert found.positions.tolist() == [0, 0, 1, 2, 1, 2, 3]
    taken = taken_as(made.problem, swapped)
    validate_batch(made.problem, taken)
    assert taken.seq_lens.tolist() == [1, 3, 4]
    assert has_meaning(made.problem, swapped).all()
    cut = replace(made.problem, mask=Mask.NON_CAUSAL)
    assert has_meaning(cut, swapped).tolist() == [True] * 4 + [False] * 3


@pytest.mark.parametrize("block", [-1, -7, LEAST, 14, MOST])
def test_a_block_outside_the_cache(block):
    """S-1: it has no slots, and only the outputs of its own row have no meaning."""
    made = _step()
    assert made.problem.num_blocks == 12
    table = made.batch.block_table.copy()
    table[0, 1] = block
    strange = replace(made.batch, block_table=table)
    right, found = metadata(made.problem, made.batch), planned_as(made.problem, strange)
    assert found.positions.tolist() == right.positions.tolist()
    assert found.slot_mapping.tolist() == [
        right.slot_mapping[0], -1, -1, *right.slot_mapping[3:]
    ]  # fmt: skip
    assert has_meaning(made.problem, strange).tolist() == [False] * 3 + [True] * 4
    taken = taken_as(made.problem, strange)
    validate_batch(made.problem, taken)
    table[0] = [*made.batch.block_table[0, :2], block, block]
    assert has_meaning(made.problem, strange).all()


def test_named_slots_stay_in_the_cache():
    """S-10: a slot that the cache does not have writes nothing; rows play no part in it."""
    made = _step()
    named = np.array([47, 48, 2**62, -1, -2, 0, -(2**62)])
    taken = taken_as(made.problem, replace(made.batch, slot_mapping=named))
    assert taken.slot_mapping.tolist() == [47, -1, -1, -1, -1, 0, -1]
    validate_batch(made.problem, taken)


@pytest.mark.parametrize(
    ("spelling", "elements", "legal"),
    [
        (MaskSpelling.QLEN, 19, (1, 1, 1)),
        (MaskSpelling.QLEN, 18, (1, 1, 0)),
        (MaskSpelling.QLEN, 17, (1, 0, 0)),
        (MaskSpelling.QLEN, 0, (0, 0, 0)),
        (MaskSpelling.FULL, 32, (1, 1, 1)),
        (MaskSpelling.FULL, 31, (1, 1, 0)),
        (MaskSpelling.FULL, 26, (1, 0, 0)),
    ],
)
def test_a_mask_that_is_too_short(spelling, elements, legal):
    """S-14: rows whose elements are inside the mask are computed; only the others are padding."""
    made = _step(Mask.TREE, spelling)
    short = replace(made.batch, mask=made.batch.mask[:elements])
    assert legal_rows(made.problem, short).tolist() == [bool(row) for row in legal]
    taken = taken_as(made.problem, short)
    validate_batch(made.problem, taken)
    for row in np.flatnonzero(legal):
        whole = decode_mask(made.problem, made.batch)[row]
        assert np.array_equal(decode_mask(made.problem, taken)[row], whole)


@pytest.mark.parametrize("spelling", MaskSpelling)
def test_a_tree_behind_a_row_that_is_not_legal(spelling):
    """S-14: that row has elements of its own: 3 * 3, or 3 * 2 where lines have their context."""
    made = _step(Mask.TREE, spelling)
    batch = replace(made.batch, seq_lens=_i32(6, 2, 5))
    if spelling is MaskSpelling.FULL:
        mask = np.delete(made.batch.mask, [18, 21, 24])
        batch = replace(batch, mask=mask)
    assert legal_rows(made.problem, batch).tolist() == [True, False, True]
    taken = taken_as(made.problem, batch)
    validate_batch(made.problem, taken)
    assert np.array_equal(decode_mask(made.problem, taken)[0], FORK)
    positions = metadata(made.problem, made.batch).positions
    assert planned_as(made.problem, batch).positions.tolist() == [*positions[:3], 0, 0, 0, 4]


def test_a_tree_of_too_many_nodes():
    """S-14: max_draft_tokens bounds a row."""
    made = _step(Mask.TREE)
    problem = replace(made.problem, max_draft_tokens=2)
    assert legal_rows(problem, made.batch).tolist() == [False, False, True]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(data=st.data(), mask=st.sampled_from(Mask), spelling=st.sampled_from(MaskSpelling))
def test_steps_with_arbitrary_values(data, mask, spelling):
    """S-1, S-2, S-9, S-14: it is taken for a legal one."""
    made = _step(mask, spelling)
    edges = st.one_of(st.integers(-3, 20), st.sampled_from([LEAST, MOST]))
    changes = {
        name: _i32(*data.draw(st.lists(edges, min_size=count, max_size=count)))
        for name, count in LENGTHS
    }
    table = made.batch.block_table.copy()
    table[data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))] = data.draw(edges)
    batch = replace(made.batch, **changes, block_table=table)
    if mask is Mask.TREE and spelling is not MaskSpelling.PACKED:
        batch = replace(batch, mask=batch.mask[: data.draw(st.integers(0, 40))])
    taken = taken_as(made.problem, batch)
    distinct = np.unique(taken.slot_mapping[taken.slot_mapping >= 0])
    size, rows = made.problem.block_size, range(taken.num_rows)
    for row in rows:
        assert np.isin(used_blocks(taken, row, size), range(made.problem.num_blocks)).all()
    if len(distinct) == (taken.slot_mapping >= 0).sum():
        nodes = 7 if mask is Mask.TREE else 0  # of padded rows
        # Rows may name blocks of each other (S-13): here each has its own.
        own = np.arange(taken.block_table.size, dtype=np.int32).reshape(taken.block_table.shape)
        room = replace(made.problem, max_rows=9, max_draft_tokens=nodes, num_blocks=own.size + 99)
        validate_batch(room, replace(taken, block_table=own))
    served = np.concatenate([[0], taken.seq_lens])[1:][-3:] > 0
    assert not (served & ~legal_rows(made.problem, batch)).any()
