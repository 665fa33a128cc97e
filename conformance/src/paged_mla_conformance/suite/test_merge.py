"""Merging partial results (S-8)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.items import skip_if
from paged_mla_conformance.suite.selection.params import CaseParam, why_skip
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.tolerance.compare import Check, check_merge
from paged_mla_shared.backend import Runner
from paged_mla_shared.cases import MERGES, Case, MergeCase, Row

pytestmark = pytest.mark.mla(group="merge", ops=("merge",), rules=("S-8",))


def _runner(item: pytest.Item, run: Run, case: MergeCase) -> Runner:
    """Prepare a runner for a merge; its problem matters only for the tokens and heads."""
    step = Case(
        group="merge",
        name="runner",
        why="a problem for the runner of a merge",
        rules=("S-8",),
        rows=tuple(Row(1, 1) for _ in range(case.tokens)),
        num_heads=case.num_heads,
        is_large=case.is_large,
    )
    adapted, _ = adapt_case(step, run.backend.capabilities)
    skip_if(item, why_skip(run, CaseParam(adapted, run.dtypes[0]), ("merge",)))
    return run.backend.prepare(adapted.problem(run.dims, run.dtypes[0]))


@pytest.mark.parametrize("case", MERGES, ids=lambda case: case.name)
def test_merge(
    mla_run: Run, mla_checks: list[Check], case: MergeCase, request: pytest.FixtureRequest
) -> None:
    """S-8: a merge is right; partial results without keys have weight 0, even if they are NaN."""
    runner = _runner(request.node, mla_run, case)
    partials = case.build(mla_run.dims.kv_lora_rank)
    mla_checks += check_merge(runner.merge(partials), merge(partials), partials)


@pytest.mark.parametrize(
    "case", [case for case in MERGES if len(case.parts) > 2], ids=lambda case: case.name
)
def test_association(
    mla_run: Run, mla_checks: list[Check], case: MergeCase, request: pytest.FixtureRequest
) -> None:
    """S-8: merging some partial results first gives the same output.

    The inner outputs, their lse (the weights of the outer merge) and the outer merge may each have
    the error of one merge. The budget for three times as many partial results covers all of them.
    """
    runner = _runner(request.node, mla_run, case)
    partials = case.build(mla_run.dims.kv_lora_rank)
    for cut in (1, len(partials) - 1):
        inner = [runner.merge(part) for part in (partials[:cut], partials[cut:])]
        mla_checks += check_merge(runner.merge(inner), merge(partials), partials * 3)
