"""Single faults: one length, one block, one row or one number that is not what it should be."""

from __future__ import annotations

from collections.abc import Iterator

from paged_mla_reference.debug.checks import Examination
from paged_mla_reference.debug.finding import Stage
from paged_mla_reference.debug.hypothesis import Hypothesis


def single_faults(found: Examination, stage: Stage) -> Iterator[Hypothesis]:
    """Return the single faults that may explain what is wrong in a stage."""
    yield from ()
