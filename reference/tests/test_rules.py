"""Every rule has a sentence, and a test that cites it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from paged_mla_reference.rules import RULES, fp8
from paged_mla_shared.formats import FORMATS


def _cited():
    """Return the rule ids in the docstrings of all other test files in this folder."""
    cited = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = ast.get_docstring(node) or ""
                cited.update(re.findall(r"S-\d+", text.partition(":")[0]))
    return cited


def test_rules_are_numbered_without_a_gap():
    assert list(RULES) == [f"S-{n}" for n in range(1, 23)]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_cited(rule):
    assert rule in _cited()


def test_no_unknown_rule_is_cited():
    assert _cited() <= set(RULES)


def test_the_text_states_what_is_implemented():
    """S-11: the rule names plain formats, and the module that it cites every other one."""
    assert "`fp8.py`" in RULES["S-11"]
    text = RULES["S-11"] + str(fp8.__doc__)
    assert all(f"`{name}`" in text for name in FORMATS)
