"""The pages that show what the code prints show what it prints."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = Path(__file__).parents[1] / "src/paged_mla_optimized"
HEAD = "| requirement | if it is not met | checked by |\n|---|---|---|\n"
OPERATIONS = sorted(path.parent.name for path in SOURCE.glob("operations/*/__init__.py"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_page_of_an_operation_has_its_files_and_kernels(operation):
    """The page links every file that launches a kernel, and every kernel file that it launches."""
    folder = SOURCE / "operations" / operation
    linked = re.findall(r"\]\(([^)#]+)\)", (folder / "README.md").read_text())
    found = {(folder / target).resolve() for target in linked}
    for file in folder.glob("*.py"):
        if file.name not in {"__init__.py", "jobs.py"}:
            assert file in found
        launched = r"from paged_mla_optimized\.(kernels\.\S+) import (?:\w+|\([^)]+)_kernel\b"
        kernels = re.findall(launched, file.read_text())
        for kernel in kernels:
            assert SOURCE / f"{kernel.replace('.', '/')}.py" in found


@pytest.mark.parametrize("page", ["schedule.md", "layer.md"])
def test_worked_examples(page):
    """S-17, S-20: how one step is cut into work; S-21: which of its rows are absorbed."""
    found = doctest.testfile(str(DOCS / page), module_relative=False)
    assert found.failed == 0
    assert found.attempted > 0


def test_every_condition_of_the_contract_is_checked_or_has_a_reason():
    """S-9: the last cell names an error, a check or another program; or the reason for no check."""
    page = (DOCS / "contract.md").read_text()
    tables = page.split(HEAD)[1:]
    conditions = [line for table in tables for line in table.split("\n\n")[0].split("\n")]
    assert len(conditions) > 30
    for condition in conditions:
        keep, _, check = condition.strip("|").rsplit("|", 2)
        assert check.strip(), keep
        assert not re.search(r"(?i)not checked[\s.]*($|;)", check), keep
