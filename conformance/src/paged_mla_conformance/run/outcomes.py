"""The result of a test, before and after the test runs."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace

import pytest

from paged_mla_conformance.run.expected_failures import ExpectedFailure
from paged_mla_conformance.run.reports.result import FAILING, Result
from paged_mla_conformance.suite.selection.items import (
    RUN,
    SKIP,
    case_of,
    marker_of,
    test_id,
    traits_of,
)
from paged_mla_conformance.suite.trials.traces import TraceTrial
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.tolerance.compare import Check

EXPECTED = pytest.StashKey[dict[str, ExpectedFailure]]()
TRIAL = pytest.StashKey[Trial | TraceTrial]()
CHECKS = pytest.StashKey[list[Check]]()
EVERY = pytest.StashKey[list[str]]()  # ids of all tests, also of the deselected ones
WARNED = pytest.StashKey[Counter[str]]()  # warnings of the backend that were not yet reported


def unanswered(item: pytest.Item) -> Result:
    """Return the result of a test that has not run. Its outcome is "failed" until the test runs."""
    marker, run, case = marker_of(item), item.config.stash[RUN], case_of(item)
    doc = getattr(item, "obj", None).__doc__ or ""
    return Result(
        test=test_id(item),
        group=marker.kwargs["group"],
        rules=list(case.rules if case else marker.kwargs["rules"]),
        why=case.why if case else " ".join(doc.split()),
        outcome="failed",
        replay=shlex.join(
            [
                *("paged-mla", "conformance", "--backend", run.factory),
                *("--dims", run.dims_name, "--dtypes", ",".join(run.dtypes)),
                *("--profile", run.profile.name, "--only", test_id(item)),
            ]
        ),
        traits=traits_of(item),
    )


def result_of(item: pytest.Item, report: pytest.TestReport) -> Result:
    """Return the result of a test that ran or that the suite skipped.

    A test that something else than the suite skips, for example the backend, has failed.
    """
    trial = item.stash.get(TRIAL, None)
    skip = item.stash.get(SKIP, None)
    expected = item.config.stash[EXPECTED].get(test_id(item))
    outcome, message = _outcome(report, expected), report.longreprtext
    if outcome == "skipped" and skip is None:
        outcome, message = "failed", f"this test was skipped, but not by the suite: {message}"
    checks = trial.checks if trial else item.stash.get(CHECKS, [])
    return replace(
        unanswered(item),
        outcome=outcome,
        reason=skip.reason if skip else expected.reason if expected else "",
        undeclared_core=bool(skip and skip.undeclared_core),
        message=message if outcome in FAILING else "",
        note=getattr(trial, "note", ""),
        checks=[vars(check) for check in checks],
        ms=round(report.duration * 1e3, 3),
    )


def _outcome(report: pytest.TestReport, expected: ExpectedFailure | None) -> str:
    if report.outcome == "skipped" and expected and hasattr(report, "wasxfail"):
        return "expected-failure"
    if report.outcome == "failed" and expected and "XPASS" in report.longreprtext:
        return "unexpected-pass"
    return report.outcome
