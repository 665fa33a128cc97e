"""Every rule of the specification is cited by a test of the reference or of the suite.

Prints one line per rule: how many tests cite it. A rule without a test is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
RULES = ROOT / "reference/src/paged_mla_reference/rules.py"
TESTS = ("reference/tests", "optimized/tests", "conformance/tests")
CASES = "shared/src/paged_mla_shared/cases"
RULE = re.compile(r"\bS-\d+\b")


def rules() -> list[str]:
    """Return the ids that the reference lists."""
    tree = ast.parse(RULES.read_text())
    keys = [k for node in ast.walk(tree) if isinstance(node, ast.Dict) for k in node.keys]
    return [k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]


def citations() -> Counter[str]:
    """Count the test functions, and the case modules, that cite each rule."""
    cited: Counter[str] = Counter()
    for folder in TESTS:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    cited.update(set(RULE.findall(ast.get_docstring(node) or "")))
    for path in sorted((ROOT / CASES).glob("*.py")):
        literals = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        cited.update({str(n.value) for n in literals if RULE.fullmatch(str(n.value))})
    return cited


def main() -> int:
    """Return 0 when no rule lacks a test."""
    cited = citations()
    for rule in rules():
        print(f"{rule:5} cited by {cited[rule]}")
    missing = [rule for rule in rules() if not cited[rule]]
    if missing or not rules():
        print(f"rules without a test: {missing or 'no rule found'}")
        return 1
    print("rules without a test: none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
