"""What is known of a test: which case it asks, under which id, and what became of it."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace

import pytest

from paged_mla_conformance.expected import ExpectedFailure
from paged_mla_conformance.profile import Run
from paged_mla_conformance.quick.choice import Claim
from paged_mla_conformance.result import FAILING, Result
from paged_mla_conformance.selection import (
    CaseParam,
    Skip,
    TraceParam,
    why_left_out,
    why_skip,
    why_skip_trace,
    why_skip_word,
)
from paged_mla_conformance.traces import TraceTrial
from paged_mla_conformance.trial import Trial
from paged_mla_reference.judging.compare import Check
from paged_mla_shared.cases import Case

RUN = pytest.StashKey[Run]()
EXPECTED = pytest.StashKey[dict[str, ExpectedFailure]]()
SKIP = pytest.StashKey[Skip]()
TRIAL = pytest.StashKey[Trial | TraceTrial]()
CHECKS = pytest.StashKey[list[Check]]()
EVERY = pytest.StashKey[list[str]]()  # ids of all tests, those that are deselected among them
QUICK = pytest.StashKey[Claim]()
WARNED = pytest.StashKey[Counter[str]]()  # warnings of the backend that nobody has taken yet


def marker_of(item: pytest.Item) -> pytest.Mark:
    """Return the ``mla`` marker of a suite test."""
    marker = item.get_closest_marker("mla")
    assert marker is not None
    return marker


def test_id(item: pytest.Item) -> str:
    """Return ``test_function[param]``, the id in reports and expected-failures files."""
    return item.name


def skip_if(item: pytest.Item, skip: Skip | None) -> None:
    """Skip a test for a reason that the suite has, if it has one."""
    if skip is not None:
        item.stash[SKIP] = skip
        pytest.skip(skip.reason)


def param_of(item: pytest.Item) -> CaseParam | TraceParam | None:
    """Return the case or the schedule that a test asks, ``None`` if it builds its own steps."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    param = params.get("trial", params.get("trace_trial"))
    return param if isinstance(param, CaseParam | TraceParam) else None


def is_without_parameter(item: pytest.Item) -> bool:
    """Return whether a test needs a case or a schedule, and none was left for it."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return not {"trial", "trace_trial"}.isdisjoint(params) and param_of(item) is None


def why_not_asked(item: pytest.Item) -> Skip | None:
    """Return why the backend is not asked a test, ``None`` if it is."""
    run, marks = item.config.stash[RUN], marker_of(item).kwargs
    skip = why_left_out(run, marks["group"], case_id(item))
    for word in (*marks["ops"], *marks.get("features", ())):
        skip = skip or why_skip_word(run, word)
    param = param_of(item)
    if isinstance(param, CaseParam):
        skip = skip or why_skip(run, param, marks["ops"])
    elif isinstance(param, TraceParam):
        skip = skip or why_skip_trace(run, param)
    return skip


def case_id(item: pytest.Item) -> str | None:
    """Return the id of the case a test asks, ``None`` for tests that build their own steps."""
    case = _case(item)
    return case.id if case else None


def is_huge(item: pytest.Item) -> bool:
    """Return whether a test's cache is of gigabytes, for ids and offsets that need many bits."""
    case = _case(item)
    return case is not None and case.placed_high


def unanswered(item: pytest.Item) -> Result:
    """Return what is known of a test before it ran."""
    marker, run, case = marker_of(item), item.config.stash[RUN], _case(item)
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
    )


def result_of(item: pytest.Item, report: pytest.TestReport) -> Result:
    """Return what became of a test; only what the suite decided to skip is skipped."""
    trial = item.stash.get(TRIAL, None)
    skip = item.stash.get(SKIP, None)
    expected = item.config.stash[EXPECTED].get(test_id(item))
    outcome, message = _outcome(report, expected), report.longreprtext
    if outcome == "skipped" and skip is None:
        outcome, message = "failed", f"skipped, and not by the suite: {message}"
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


def _case(item: pytest.Item) -> Case | None:
    """Return the case a test asks, ``None`` for tests that build their own steps."""
    param = param_of(item)
    return param.case if isinstance(param, CaseParam) else None


def _outcome(report: pytest.TestReport, expected: ExpectedFailure | None) -> str:
    if report.outcome == "skipped" and expected and hasattr(report, "wasxfail"):
        return "expected-failure"
    if report.outcome == "failed" and expected and "XPASS" in report.longreprtext:
        return "unexpected-pass"
    return report.outcome
