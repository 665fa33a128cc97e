"""The pages that show what the code prints show what it prints."""

from __future__ import annotations

import doctest
from pathlib import Path

SCHEDULE = Path(__file__).parents[1] / "docs" / "schedule.md"


def test_the_worked_step():
    """S-17, S-20: units, cuts, shares, joins and partials of one step, free and fixed."""
    found = doctest.testfile(str(SCHEDULE), module_relative=False)
    assert found.failed == 0
    assert found.attempted > 0
