"""What explains a dump equally well: the narrower is named first, and the others with it."""

from __future__ import annotations

import pytest
from dumped import case, dumped

from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis, catalogued
from paged_mla_reference.explain.hypotheses.ordinary import breadth
from paged_mla_shared.cases import Row

CHUNKS, DECODE = (Row(9, 5), Row(20, 3)), (Row(37, 1), Row(20, 1))


def known(name: str) -> Hypothesis:
    [found] = [h for h in catalogued(Stage.ATTENTION) if h.name == name]
    return found


def test_breadth_is_of_ordinary_steps():
    """A fault of rows with several queries breaks fewer than one of all rows."""
    narrow, broad = map(breadth, map(known, ("lse-in-base-2-on-extend-rows", "lse-in-base-2")))
    assert 0 < narrow < broad
    assert breadth(Hypothesis("nothing", "Nothing.", lambda oracle: oracle)) == 0


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (CHUNKS, ["lse-in-base-2-on-extend-rows", "lse-in-base-2"]),
        (DECODE, ["lse-in-base-2"]),
    ],
)
def test_the_narrower_comes_first(rows: tuple[Row, ...], names: list[str]):
    """S-7: every row of the dump has several queries, or none has."""
    found = explain(dumped("lse-in-base-2", of=case(rows)))
    assert [fit.hypothesis.name for fit in found.best if fit.hypothesis.known] == names
    for other in names[1:]:
        assert other in found.cause
