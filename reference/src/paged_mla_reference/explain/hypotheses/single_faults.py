"""Search for single faults: one wrong length, block, token or number.

The search returns only single faults that the wrong values of the dump suggest.
"""

from __future__ import annotations

from collections.abc import Iterator

from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.explain.hypotheses.key_faults import faults_of_keys
from paged_mla_reference.explain.hypotheses.number_faults import faults_of_numbers
from paged_mla_reference.explain.hypotheses.plan_faults import faults_of_plan
from paged_mla_reference.explain.hypotheses.row_faults import faults_of_rows
from paged_mla_reference.explain.hypotheses.sum_faults import faults_of_sums
from paged_mla_reference.explain.hypotheses.write_faults import faults_of_writes

_SEARCHES = {
    Stage.METADATA: (faults_of_plan,),
    Stage.APPEND: (faults_of_writes,),
    Stage.ATTENTION: (faults_of_keys, faults_of_rows, faults_of_numbers, faults_of_sums),
}


def single_faults(found: Examination, stage: Stage) -> Iterator[Hypothesis]:
    """Return the single faults that may explain what is wrong in a stage."""
    told: set[str] = set()
    for search in _SEARCHES.get(stage, ()):
        for fault in search(found):
            if fault.name not in told:
                told.add(fault.name)
                yield fault
