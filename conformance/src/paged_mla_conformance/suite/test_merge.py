"""Joining partial answers (S-8)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.compare import Check, check_merge
from paged_mla_conformance.profile import Run
from paged_mla_reference.merge import merge
from paged_mla_shared.cases import MERGES, MergeCase
from paged_mla_shared.cases.decode import CASES
from paged_mla_shared.inputs import build_steps

pytestmark = pytest.mark.mla(group="merge", ops=("merge",), rules=("S-8",))


@pytest.mark.parametrize("case", MERGES, ids=lambda case: case.name)
def test_merge(mla_run: Run, mla_checks: list[Check], case: MergeCase) -> None:
    """A merge is total: empty partials weigh exactly nothing, whatever they hold."""
    [step] = build_steps(CASES[0], mla_run.dims, mla_run.dtypes[0])
    runner = mla_run.backend.prepare(step.problem)
    partials = case.build(5, 3, mla_run.dims.kv_lora_rank)
    mla_checks += check_merge(runner.merge(partials), merge(partials), partials)


@pytest.mark.parametrize(
    "case", [case for case in MERGES if len(case.parts) > 2], ids=lambda case: case.name
)
def test_association(mla_run: Run, mla_checks: list[Check], case: MergeCase) -> None:
    """S-8: some partials may be merged before the others.

    The inner answers, their lse (which weighs its answer and the others) and the outer merge are
    each as far off as one merge may be, so that all are no further off than of three times as many.
    """
    [step] = build_steps(CASES[0], mla_run.dims, mla_run.dtypes[0])
    runner = mla_run.backend.prepare(step.problem)
    partials = case.build(5, 3, mla_run.dims.kv_lora_rank)
    for cut in (1, len(partials) - 1):
        inner = [runner.merge(part) for part in (partials[:cut], partials[cut:])]
        mla_checks += check_merge(runner.merge(inner), merge(partials), partials * 3)
