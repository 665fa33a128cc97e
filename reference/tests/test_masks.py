"""Which keys a query sees, and how a tree mask is spelled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import request, scene

from paged_mla_reference.rules.masks import decode_mask, spell_mask, visibility
from paged_mla_shared.problem import Mask, MaskSpelling

FORK = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)  # root with two children
CHAIN = np.array([[1, 0], [1, 1]], bool)


def _rows(matrix):
    return ["".join(map(str, line.astype(int))) for line in matrix]


def test_causal_is_aligned_to_the_bottom_right():
    """S-4: the first of 2 queries of a row of 5 sees keys 0..3, the second all."""
    made = scene([request(5, 1), request(3, 2)], [3, 0])
    seen = visibility(made.problem, made.batch)
    assert _rows(seen[0]) == ["11110", "11111"]
    assert _rows(seen[1]) == ["100", "110", "111"]


def test_non_causal_sees_the_whole_row():
    """S-4: the boundary is the row's length."""
    made = scene([request(4, 1)], [1], mask=Mask.NON_CAUSAL)
    assert _rows(visibility(made.problem, made.batch)[0]) == ["1111"] * 3


def test_more_queries_than_keys_see_all_of_them():
    """S-2, S-4: without a causal mask 3 queries at 1 key all see it."""
    made = scene([request(3, 1)], [0], mask=Mask.NON_CAUSAL)
    short = replace(made.batch, seq_lens=np.ones(1, np.int32))
    assert _rows(visibility(made.problem, short)[0]) == ["1"] * 3


def test_tree_sees_the_context_and_the_nodes_of_its_line():
    """S-4: context columns are open, draft columns follow the mask; siblings are blind."""
    made = scene([request(5, 1)], [2], mask=Mask.TREE, tree=FORK.ravel())
    assert _rows(visibility(made.problem, made.batch)[0]) == ["11100", "11110", "11101"]


def test_a_padded_row_sees_nothing():
    """S-2, S-4: a row of length 0 has no key, with any mask."""
    made = scene([request(3, 1)], [0], mask=Mask.TREE, tree=FORK.ravel())
    padded = replace(made.batch, seq_lens=np.zeros(1, np.int32))
    assert visibility(made.problem, padded)[0].shape == (3, 0)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (MaskSpelling.QLEN, "100 110 101" + "10 11"),
        (MaskSpelling.FULL, "1100 1110 1101" + "11110 11111"),
    ],
    ids=["qlen", "full"],
)
def test_flat_spellings(spelling, expected):
    """S-14: rows of 1 + 3 and 3 + 2 tokens, flattened one after the other."""
    flat = spell_mask([FORK, CHAIN], spelling, np.array([4, 5], np.int32), 3)
    assert flat.dtype == np.bool_
    assert "".join(map(str, flat.astype(int))) == expected.replace(" ", "")


def test_packed_spelling():
    """S-14: bit j % 8 of byte j // 8; 9 nodes take 2 bytes, padded lines hold anything."""
    last = np.eye(9, dtype=bool)
    last[8, 0] = True
    packed = spell_mask([FORK, last], MaskSpelling.PACKED, np.array([3, 9], np.int32), 9, 13)
    assert packed.shape == (13, 2)
    assert packed[:3].tolist() == [[0b001, 0], [0b011, 0], [0b101, 0]]
    assert packed[10].tolist() == [0b10000000, 0]
    assert packed[11].tolist() == [0b00000001, 0b1]


@pytest.mark.parametrize(("drafts", "width"), [(3, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_packed_width(drafts, width):
    """S-14: a line has a bit for every draft token a row may have, in whole bytes."""
    packed = spell_mask([FORK], MaskSpelling.PACKED, np.array([3], np.int32), drafts)
    assert packed.shape == (3, width)


def test_padded_lines_are_ones():
    """S-14: lines past the rows' queries are filled, so that reading them shows."""
    packed = spell_mask([FORK], MaskSpelling.PACKED, np.array([3], np.int32), 9, 5)
    assert packed[3:].tolist() == [[255, 255]] * 2


def test_every_row_has_a_matrix():
    """S-14: a mask of fewer rows than the step is a mistake of the caller."""
    with pytest.raises(ValueError, match="longer than"):
        spell_mask([FORK], MaskSpelling.QLEN, np.array([3, 4], np.int32), 3)


def test_full_spelling_has_no_bytes_for_padded_rows():
    """S-14: a row of length 0 with 2 queries must not shift the mask of the next."""
    lens = np.array([0, 4], np.int32)
    flat = spell_mask([np.eye(2, dtype=bool), FORK], MaskSpelling.FULL, lens, 3)
    assert flat.tolist() == spell_mask([FORK], MaskSpelling.FULL, lens[1:], 3).tolist()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 6)), max_size=4),
    spelling=st.sampled_from(MaskSpelling),
    seed=st.integers(0, 99),
)
def test_every_spelling_encodes_the_same_mask(sizes, spelling, seed):
    """S-14: decoding a spelling returns the matrices it was made from."""
    rng = np.random.default_rng(seed)
    trees = [np.tril(rng.random((q, q)) < 0.5) | np.eye(q, dtype=bool) for q, _ in sizes]
    requests = [request(q + context, 1) for q, context in sizes]
    made = scene(requests, [context for _, context in sizes], mask=Mask.TREE)
    problem = replace(made.problem, mask_spelling=spelling)
    mask = spell_mask(trees, spelling, made.batch.seq_lens, 11, made.batch.num_tokens)
    decoded = decode_mask(problem, replace(made.batch, mask=mask))
    assert [tree.tolist() for tree in decoded] == [tree.tolist() for tree in trees]
