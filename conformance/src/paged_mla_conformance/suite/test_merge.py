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
