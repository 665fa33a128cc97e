"""A context in chunks is the context in one piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import problem_of
from test_prefill import rows

from paged_mla_reference.rules.chunked import context_chunks, merge_parts, parts_of
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.problem import Output

U = 2.0**-24  # of float32, in which parts travel


def exactly(batch):
    """Return the output of a prefill, computed in float64 and rounded to float32 at the end."""
    return prefill(problem_of(), batch, Rounding.EXACT).output("float32")


def assert_invariant(batch, workspace):
    """Hold that chunks give the whole, up to float32.

    Outputs of parts are off by U, their lse by U of their size, which moves a weight by twice as
    much; the merge rounds both once more.
    """
    whole = prefill(problem_of(), batch, Rounding.EXACT)
    chunked = merge_parts([exactly(part) for part in parts_of(batch, workspace)])
    lse = np.where(np.isfinite(whole.lse), whole.lse, 0.0)
    parts = [exactly(part).lse for part in parts_of(batch, workspace)]
    largest = max(np.abs(p[np.isfinite(p)]).max(initial=0) for p in parts)
    out_budget = U * (2 + 2 * largest) * np.abs(batch.v[np.isfinite(batch.v)]).max(initial=0)
    assert np.abs(chunked.out - whole.out).max(initial=0) <= out_budget
    assert (np.isneginf(chunked.lse) == np.isneginf(whole.lse)).all()
    finite = np.where(np.isfinite(chunked.lse), chunked.lse, 0.0)
    assert np.abs(finite - lse).max(initial=0) <= U * 2 * largest


def test_chunks_by_hand():
    """S-21: contexts 5, 0 and 4 in a workspace of 3: the second chunk has some of two rows."""
    chunks = context_chunks(np.array([5, 0, 4]), 3)
    assert [c.starts.tolist() for c in chunks] == [[0, 0, 0], [3, 0, 0], [5, 0, 1]]
    assert [c.lens.tolist() for c in chunks] == [[3, 0, 0], [2, 0, 1], [0, 0, 3]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    contexts=st.lists(st.integers(0, 9), max_size=6).map(lambda x: np.array(x, np.int64)),
    workspace=st.integers(1, 12),
)
def test_chunks_cover_each_token_once(contexts, workspace):
    """S-21: in order, and every chunk but the last fills the workspace."""
    chunks = context_chunks(contexts, workspace)
    for row, length in enumerate(contexts.tolist()):
        spans = [range(c.starts[row], c.starts[row] + c.lens[row]) for c in chunks]
        assert [position for span in spans for position in span] == list(range(length))
    sums = [int(chunk.lens.sum()) for chunk in chunks]
    assert all(total == workspace for total in sums[:-1])
    assert all(0 < total <= workspace for total in sums)


@pytest.mark.parametrize("workspace", [1, 3, 7, 100])
def test_rows_with_and_without_context(workspace):
    """S-8, S-21: rows whose context ends in another chunk, or that have none."""
    batch = rows((9, 2), (3, 3), (0, 0), (7, 1), (4, 0), (12, 5), (1, 1))
    assert_invariant(batch, workspace)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=5),
    workspace=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_any_rows(lengths, workspace, seed):
    """S-19, S-21: the workspace is not semantics."""
    assert_invariant(rows(*lengths, seed=seed), workspace)


def test_a_prefix_of_1000_and_7_new_tokens():
    """S-21: as an engine serves a prefix hit."""
    assert_invariant(rows((1007, 7)), 256)


def test_a_row_without_context_contributes_nothing():
    """S-8, S-21: its output has exactly the bits of the output over its own keys."""
    batch = rows((9, 2), (3, 3), (4, 4))
    chunks = parts_of(batch, 4)
    answers = [exactly(part) for part in chunks]
    assert all((answer.out[2:9] == 0).all() for answer in answers[:-1])
    assert all(np.isneginf(answer.lse[2:9]).all() for answer in answers[:-1])
    merged = merge_parts(answers)
    assert merged.out[2:].tobytes() == answers[-1].out[2:].tobytes()
    assert merged.lse[2:].tobytes() == answers[-1].lse[2:].tobytes()


def test_padding_that_reads_unwritten_memory_is_not_an_error():
    """S-17, S-21: a part that is NaN makes its own tokens NaN; the others have the same bits."""
    answers = [exactly(part) for part in parts_of(rows((9, 2), (7, 3)), 4)]
    whole = merge_parts(answers)
    answers[0].out[:2] = np.nan
    answers[0].lse[:2] = np.nan
    merged = merge_parts(answers)
    assert np.isnan(merged.out[:2]).all()
    assert np.isnan(merged.lse[:2]).all()
    assert merged.out[2:].tobytes() == whole.out[2:].tobytes()
    assert merged.lse[2:].tobytes() == whole.lse[2:].tobytes()


def test_a_row_without_a_query_costs_nothing():
    """S-9, S-21: none of its keys, which may hold anything, is in a part."""
    parts = parts_of(rows((9, 2), (7, 0), (4, 4)), 4)
    assert [part.seq_lens.tolist() for part in parts] == [[4, 0, 0], [3, 0, 0], [2, 0, 4]]


def test_partials_in_base_2_are_not_the_whole():
    """S-7, S-21: a context whose lse is in base 2 is weighed too much."""
    batch = rows((12, 2))
    parts = parts_of(batch, 100)
    context, own = (exactly(part) for part in parts)
    in_base_2 = Output(context.out, (context.lse / np.log(2)).astype(np.float32))
    right, wrong = merge_parts([context, own]), merge_parts([in_base_2, own])
    assert np.abs(wrong.out - right.out).max() > 1e-3
