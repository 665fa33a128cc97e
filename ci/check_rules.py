"""Check that the suite and the tests of the reference cover every rule.

The suite covers a rule if a case or the marker of a test has its id. The tests of the reference
cover a rule if the docstring of a test has its id. Other tests do not count: the conformance
package's tests test the suite itself, and those of a backend test only that backend.

The command prints the counts of each rule. A rule without either kind of test is an error.
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
    """Print the counts; return 0 if the suite and the reference cover every rule, otherwise 1."""
    cases, suite, tests = asked_by_cases(), asked_by_tests(), held_by_tests()
    for rule in RULES:
        asked = f"the suite has {cases[rule]:3} cases and {suite[rule]} other tests"
        print(f"{rule:5} {asked}, the reference has {tests[rule]:2} tests")
    lacking = [rule for rule in RULES if not (cases[rule] + suite[rule] and tests[rule])]
    unknown = sorted({*cases, *suite, *tests} - set(RULES))
    print(f"rules without tests in the suite or the reference: {', '.join(lacking) or 'none'}")
    print(f"ids in tests that are not those of rules: {', '.join(unknown) or 'none'}")
    return 1 if lacking or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
