"""No group of cases is smaller than what engines serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paged_mla_conformance.meta import envelope
from paged_mla_conformance.meta.envelope import PRODUCTION, envelopes, of_cases, shortfalls
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS
from paged_mla_shared.cases import GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "envelope.md"


def test_every_group_that_asks_steps_has_an_envelope():
    """Only the errors group, whose steps are meant to be refused, has no size to reach."""
    assert set(PRODUCTION) == set(envelopes())
    assert set(SUITE_GROUPS) - set(PRODUCTION) == {"errors"}


@pytest.mark.parametrize("group", PRODUCTION)
def test_a_group_reaches_production(group: str):
    """S-19: what shows past a size is asked past that size."""
    assert shortfalls(group, envelopes()[group]) == []


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_short_cases_is_refused(group: str):
    """The demand is one that short cases do not meet."""
    short = [replace(case, rows=case.rows[:2], then=(), cache_blocks=0) for case in GROUPS[group]]
    few = [case for case in short if all(row.seq_len <= 300 for row in case.rows)]
    small = [replace(case, cache_elements=0) for case in few]
    assert shortfalls(group, of_cases(small))


def test_the_page_is_that_of_the_cases():
    """The table in the docs is generated, and is of today's cases."""
    assert PAGE.read_text() == envelope.page()
