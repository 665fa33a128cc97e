"""Collects what became of each test, across workers, and says the verdict."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from paged_mla_conformance import html
from paged_mla_conformance.compare import Check
from paged_mla_conformance.expected import ExpectedFailure
from paged_mla_conformance.profile import Run
from paged_mla_conformance.report import FAILING, Report, Result
from paged_mla_conformance.selection import CaseParam, Skip
from paged_mla_conformance.traces import TraceTrial
from paged_mla_conformance.trial import Trial
from paged_mla_shared.cases import Case

RUN = pytest.StashKey[Run]()
EXPECTED = pytest.StashKey[dict[str, ExpectedFailure]]()
SKIP = pytest.StashKey[Skip]()
TRIAL = pytest.StashKey[Trial | TraceTrial]()
CHECKS = pytest.StashKey[list[Check]]()

_RESULT = "paged-mla-result"
_LOST_DEVICE = ("CUDA error", "device-side assert", "illegal memory access")


class Collector:
    """Pytest plugin of one run: on workers it attaches results, on the controller it reports."""

    def __init__(self, config: pytest.Config, report: Report) -> None:
        self._config = config
        self._report = report
        self._is_worker = hasattr(config, "workerinput")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the result to pytest's report, which crosses from worker to controller."""
        report = yield
        decided = report.when == "call" or report.outcome != "passed"
        if item.get_closest_marker("mla") is not None and decided:
            report.user_properties.append((_RESULT, _result(item, report)))
        if call.excinfo is not None and any(w in str(call.excinfo.value) for w in _LOST_DEVICE):
            item.session.shouldstop = "the device is lost; later results would mean nothing"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect a result."""
        for key, value in report.user_properties:
            if key == _RESULT:
                assert isinstance(value, dict)
                self._report.results.append(Result(**value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the reports; the exit status follows the verdict."""
        if self._is_worker:
            return
        report = self._report
        if session.shouldstop:
            report.errors.append(str(session.shouldstop))
        if exitstatus not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            report.errors.append(f"pytest stopped with exit status {int(exitstatus)}")
        path: Path | None = self._config.getoption("--mla-report")
        if path is not None:
            document = report.write(path)
            html.write(document, path.with_suffix(".html"))
        if report.reasons_against:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print skips by reason, failures with their replay command, and the verdict last."""
        write = terminalreporter.write_line
        terminalreporter.section("paged MLA conformance")
        for reason, count in self._report.skip_reasons.items():
            write(f"skipped {count}: {reason}")
        for result in self._report.results:
            if result.outcome == "expected-failure":
                write(f"expected failure: {result.test}: {result.reason}")
            if result.outcome in FAILING:
                write(f"{result.outcome}: {result.test}\n  replay: {result.replay}")
        for reason in self._report.reasons_against:
            write(f"against: {reason}")
        write(self._report.verdict)


def marker_of(item: pytest.Item) -> pytest.Mark:
    """Return the ``mla`` marker of a suite test."""
    marker = item.get_closest_marker("mla")
    assert marker is not None
    return marker


def test_id(item: pytest.Item) -> str:
    """Return ``test_function[param]``, the id in reports and expected-failures files."""
    return item.name


def case_id(item: pytest.Item) -> str | None:
    """Return the id of the case a test asks, ``None`` for tests that build their own steps."""
    case = _case(item)
    return case.id if case else None


def _result(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    marker = marker_of(item)
    trial = item.stash.get(TRIAL, None)
    skip = item.stash.get(SKIP, None)
    expected = item.config.stash[EXPECTED].get(test_id(item))
    run = item.config.stash[RUN]
    case = _case(item)
    doc = getattr(item, "obj", None).__doc__ or ""
    return {
        "test": test_id(item),
        "group": marker.kwargs["group"],
        "rules": list(case.rules if case else marker.kwargs["rules"]),
        "why": case.why if case else " ".join(doc.split()),
        "outcome": _outcome(report, expected),
        "reason": skip.reason if skip else expected.reason if expected else "",
        "undeclared_core": bool(skip and skip.undeclared_core),
        "message": report.longreprtext if report.outcome == "failed" else "",
        "replay": f"python -m paged_mla_conformance --backend {run.factory} "
        f"--dims {run.dims_name} --dtypes {','.join(run.dtypes)} "
        f"--profile {run.profile.name} --only '{test_id(item)}'",
        "checks": [
            vars(check) for check in (trial.checks if trial else item.stash.get(CHECKS, []))
        ],
        "ms": round(report.duration * 1e3, 3),
    }


def _case(item: pytest.Item) -> Case | None:
    """Return the case a test asks, ``None`` for tests that build their own steps."""
    assert isinstance(item, pytest.Function)
    param = item.callspec.params.get("trial") if hasattr(item, "callspec") else None
    return param.case if isinstance(param, CaseParam) else None


def _outcome(report: pytest.TestReport, expected: ExpectedFailure | None) -> str:
    if report.outcome == "skipped":
        return "expected-failure" if hasattr(report, "wasxfail") else "skipped"
    if report.outcome == "failed" and expected and "XPASS" in report.longreprtext:
        return "unexpected-pass"
    return report.outcome
