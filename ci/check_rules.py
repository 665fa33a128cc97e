"""Every rule is asked of backends by the suite, and held by a test of the reference.

The suite asks a rule by cases that name it, or by a test whose marker does. A test of the reference
holds a rule that its docstring names. Tests of the suite itself hold none, whatever they speak of;
tests of one backend hold it for that backend alone.

Prints how many there are of each. A rule that lacks either is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator

from ci.packages import ROOT
from paged_mla_reference.rules import RULES
from paged_mla_shared.cases import CASES

SUITE = ROOT / "conformance/src/paged_mla_conformance/suite"
TESTS = ROOT / "reference/tests"
RULE = re.compile(r"\bS-\d+\b")


def asked_by_cases() -> Counter[str]:
    """Count the suite's cases that name each rule."""
    return Counter(rule for cases in CASES.values() for case in cases for rule in case.rules)


def asked_by_tests() -> Counter[str]:
    """Count the suite's tests whose marker names each rule."""
    return Counter(
        rule
        for path in SUITE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "rules"
        for rule in ast.literal_eval(node.value)
    )


def held_by_tests() -> Counter[str]:
    """Count the tests of the reference whose docstring names each rule."""
    return Counter(rule for doc in _docstrings() for rule in set(RULE.findall(doc)))


def _docstrings() -> Iterator[str]:
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield ast.get_docstring(node) or ""


def main() -> int:
    """Return 0 when every rule is asked and held."""
    cases, suite, tests = asked_by_cases(), asked_by_tests(), held_by_tests()
    for rule in RULES:
        asked = f"asked by {cases[rule]:3} cases and {suite[rule]} tests by themselves"
        print(f"{rule:5} {asked}, held by {tests[rule]:2} tests of the reference")
    lacking = [rule for rule in RULES if not (cases[rule] + suite[rule] and tests[rule])]
    unknown = sorted({*cases, *suite, *tests} - set(RULES))
    print(f"rules that are not asked or not held: {', '.join(lacking) or 'none'}")
    print(f"rules that are named and do not exist: {', '.join(unknown) or 'none'}")
    return 1 if lacking or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
