"""Messages that name the common properties of wrong outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from paged_mla_reference.tolerance.pattern import describe
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Batch

ROWS = (Row(70, 1), Row(5000, 6), Row(0, 2), Row(300, 2), Row(4097, 1), Row(20, 20), Row(128, 1))
HEADS = 8


def step() -> Batch:
    case = Case(
        group="x", name="x", why="x", rules=("S-5",), rows=ROWS, num_heads=HEADS, padded_tokens=3
    )
    [built] = build_steps(case, SMALL, "float32")
    return built.batch


def facts(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Row, index in the row and keys seen of each live token; rows count padded ones too."""
    row = np.repeat(np.arange(len(ROWS)), batch.query_lens)
    index = np.concatenate([np.arange(n) for n in batch.query_lens])
    keys = np.array([ROWS[r].context_len for r in row]) + index + 1
    return row, index, keys


Choice = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda row, _i, _k: row >= 4, "rows 4 and later"),
        (lambda row, _i, _k: row == 3, "row 3"),
        (lambda row, _i, _k: row < 2, "rows up to 1"),
        (lambda _r, index, _k: index >= 6, "queries 6 and later of their rows"),
        (lambda _r, index, _k: index == 1, "query 1 of its row"),
        (lambda row, _i, keys: (keys > 4096) & (row != 2), "queries at more than 300 keys"),
        (lambda row, _i, _k: (row == 0) | (row == 4) | (row == 6), "rows of up to 1 query tokens"),
    ],
    ids=["last-rows", "one-row", "first-rows", "late-queries", "one-query", "long", "decode"],
)
def test_a_pattern_is_named(choose: Choice, said: str):
    """The message names the property that separates wrong tokens from correct ones."""
    batch = step()
    row, index, keys = facts(batch)
    wrong = np.zeros((batch.num_tokens, HEADS), bool)
    wrong[: len(row)] = (choose(row, index, keys) & (row != 2))[:, None]
    assert said in describe(wrong, batch)


def test_heads_are_named():
    """One head of every query is no matter of rows."""
    batch = step()
    wrong = np.zeros((batch.num_tokens, HEADS), bool)
    wrong[: int(batch.cu_seqlens_q[-1]), 3] = True
    wrong[1 + 6 : 1 + 6 + 2] = False  # of the padded row
    message = describe(wrong, batch)
    assert "head 3 in each of them" in message
    assert "every query" in message


def test_the_place_of_the_first_is_given():
    """Row, query and lengths of the first wrong token."""
    batch = step()
    wrong = np.zeros(batch.num_tokens, bool)
    wrong[2] = True
    assert "token 2 is query 1 of row 1 (seq_len 5000, query_len 6)" in describe(wrong, batch)


def test_no_pattern_is_made_up():
    """Scattered errors are not explained."""
    batch = step()
    wrong = np.zeros(batch.num_tokens, bool)
    wrong[[1, 3, 10, 13, 20, 27]] = True
    assert "no pattern found" in describe(wrong, batch)


def test_padding_is_called_padding():
    """Padded rows and tokens are not rows of a request."""
    batch = step()
    wrong = np.zeros(batch.num_tokens, bool)
    wrong[-1] = True
    assert "only padded tokens" in describe(wrong, batch)
