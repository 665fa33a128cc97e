"""The page of the specification has every rule, its anchor and its cases, and the version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paged_mla_reference.rules import RULES, SPECIFICATION_VERSION
from paged_mla_shared.cases import CASES

PAGE = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()
SECTIONS = dict(re.findall(r"^## (S-\d+)\n(.+?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE))


def test_every_rule_has_a_section_in_order():
    """A heading that consists of the id has the anchor ``#s-n``."""
    assert list(SECTIONS) == list(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_the_page_quotes_the_rule(rule):
    quoted = re.findall(r"^> (.+)$", SECTIONS[rule], re.MULTILINE)
    assert " ".join(quoted) == RULES[rule]


@pytest.mark.parametrize("rule", RULES)
def test_the_page_lists_the_groups_of_cases_that_name_the_rule(rule):
    [listed] = re.findall(r"^- Cases: (.+)\.$", SECTIONS[rule], re.MULTILINE)
    groups = {group for group, cases in CASES.items() if any(rule in c.rules for c in cases)}
    assert set(re.findall(r"\[(\w+)\]", listed)) == groups


def test_the_page_states_the_version():
    assert re.fullmatch(r"\d+\.\d+", SPECIFICATION_VERSION)
    assert f"**Specification version: {SPECIFICATION_VERSION}.**" in PAGE
