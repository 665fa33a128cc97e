"""The wording of a verdict: it counts every test that did not run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from paged_mla_conformance.run.reports import summary
from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS

SUBJECT = Subject(
    factory="mine:create",
    name="mine",
    version="1.2",
    mode="cpu",
    device="a CPU",
    dims="small",
    dtypes=["float32"],
    profile="strict",
)
TITLE = "mine 1.2 in mode cpu on a CPU, dims small, float32, profile strict"
PASSED = [
    Result(test=f"test_{group}", group=group, rules=[], why="", outcome="passed")
    for group in SUITE_GROUPS
]
COUNT = len(PASSED)


def report(*first: str, subject: Subject = SUBJECT) -> Report:
    """Return a report in which every group passed, except for the outcomes of the first groups."""
    results = [replace(r, outcome=o) for r, o in zip(PASSED, first, strict=False)]
    results += PASSED[len(first) :]
    return Report(subject, tests=[r.test for r in results], results=results)


def test_a_run_in_which_everything_passed():
    """S-20: only a run of the whole suite is called CONFORMANT without an addition."""
    assert report().verdict == f"CONFORMANT: {TITLE}: {COUNT} passed"


@pytest.mark.parametrize(
    ("outcomes", "evidence"),
    [
        (("skipped",), f"{COUNT - 1} passed, 1 skipped"),
        (("expected-failure",), f"{COUNT - 1} passed, 1 failed (expected)"),
        (
            ("expected-failure", "skipped", "skipped"),
            f"{COUNT - 3} passed, 1 failed (expected), 2 skipped",
        ),
    ],
)
def test_tests_that_did_not_pass_are_counted(outcomes: tuple[str, ...], evidence: str):
    """S-20: a skipped test and an expected failure are not counted as passed."""
    verdict = report(*outcomes).verdict
    assert verdict == f"CONFORMANT with exclusions: {TITLE}: {evidence}"


def test_a_test_whose_capability_is_not_declared_is_not_supported():
    """S-20: tests that the run excludes are skipped, others are not supported."""
    found = report("skipped", "skipped", "skipped")
    reasons = ("merge not declared (core)", "the device has too little memory", "")
    for number, reason in enumerate(reasons):
        found.results[number] = replace(found.results[number], reason=reason)
    assert found.verdict.endswith(f"{COUNT - 3} passed, 1 not supported, 2 skipped")


def test_skipped_core_types_are_named():
    """S-20: a run with one of three core element types has exclusions."""
    chosen = replace(SUBJECT, dtypes_left_out=["float16", "bfloat16"])
    verdict = report(subject=chosen).verdict
    assert verdict.startswith("CONFORMANT with exclusions: ")
    assert verdict.endswith(f"{COUNT} passed, float16/bfloat16 skipped (--dtypes)")


def test_declared_head_sizes_that_did_not_run_are_named():
    """S-20: a run has the dims of one model; the backend may declare those of others."""
    declared = {"head_dims": [(32, 16), (256, 64), (300, 8)]}
    found = report(subject=replace(SUBJECT, dims="small", capabilities=declared))
    screen = io.StringIO()
    summary.write(found, screen)
    assert (
        "head sizes (256, 64), (300, 8) need a run of their own; use --dims " in screen.getvalue()
    )
    assert "mistral-small-4" in screen.getvalue()


@pytest.mark.parametrize("outcome", ["failed", "unexpected-pass"])
def test_one_failure_is_enough(outcome: str):
    """S-20: a failure and an unexpected pass both make the backend not conformant."""
    found = report(outcome)
    assert found.verdict == f"NOT CONFORMANT: {TITLE}: {COUNT - 1} passed, 1 failed"
    assert found.reasons_against == ["1 failing test"]
    assert not found.as_dict()["conformant"]


def test_a_missing_group_is_reported():
    """S-20: every group has results."""
    found = report()
    missing = found.results.pop(0)
    found.tests.remove(missing.test)
    assert found.reasons_against == [f"the run has no test of the group {missing.group}"]


def test_a_test_without_a_result_is_reported():
    """S-20: a run is not conformant if a test has no result."""
    found = report()
    found.results.pop()
    assert found.reasons_against == ["1 test has no result"]
    assert found.verdict.startswith("NOT CONFORMANT: ")
    assert found.verdict.endswith(f"{COUNT - 1} passed, 1 without a result")


def test_an_error_of_the_run_is_a_reason_against_the_backend():
    """S-20: a run that did not finish is not conformant."""
    found = report()
    found.errors.append("the process ended")
    assert found.reasons_against == ["the process ended"]
    assert found.verdict.startswith("NOT CONFORMANT: ")


def test_a_partial_run_gives_no_verdict_on_the_backend():
    """S-20: the backend is not called conformant, even if every selected test passed."""
    found = report()
    found.deselected = ["test_other"]
    assert found.verdict == f"PASSED in part: {TITLE}: {COUNT} passed, 1 skipped by selection"
    assert not found.as_dict()["conformant"]
    found.errors.append("the process ended")
    assert found.verdict.startswith("FAILED in part: ")


@pytest.mark.parametrize(
    ("outcome", "word"), [("passed", "INTERRUPTED"), ("failed", "NOT CONFORMANT")]
)
def test_an_interrupted_run_gives_a_verdict_only_on_a_failure(outcome: str, word: str):
    """S-20: without a failure nothing is known; a failure stays a failure."""
    found = report(outcome)
    found.interrupted = True
    assert found.verdict.startswith(f"{word}: ")
    assert "interrupted" in found.reasons_against
    assert not found.as_dict()["conformant"]


def test_a_run_that_skips_everything_is_not_conformant():
    """S-20: at least one test must run."""
    assert "no test ran" in report(*["skipped"] * COUNT).reasons_against


def test_a_backend_that_could_not_be_loaded_has_the_name_of_its_factory():
    """S-20: only the value of ``--backend`` is known of it."""
    assert Report(Subject("mine:create")).verdict == "NOT CONFORMANT: mine:create: 0 passed"
