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


def test_every_group_of_legal_steps_has_an_envelope():
    """Only the group errors, whose steps must be refused, needs no sizes."""
    assert set(PRODUCTION) == set(envelopes())
    assert set(SUITE_GROUPS) - set(PRODUCTION) == {"errors"}


@pytest.mark.parametrize("group", PRODUCTION)
def test_a_group_reaches_production(group: str):
    """S-19: faults that appear only above a size are tested above that size."""
    assert shortfalls(group, envelopes()[group]) == []


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_short_cases_is_refused(group: str):
    """Short cases are below the sizes of production."""
    short = [replace(case, rows=case.rows[:2], then=(), cache_blocks=0) for case in GROUPS[group]]
    few = [case for case in short if all(row.seq_len <= 300 for row in case.rows)]
    small = [replace(case, cache_elements=0) for case in few]
    assert shortfalls(group, of_cases(small))


def test_the_page_is_up_to_date():
    """The committed page equals the page that the command writes."""
    assert PAGE.read_text() == envelope.page()
