"""How a verdict is worded: nothing that was left out is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
    """Return a report in which every group passed, but for the outcomes of the first ones."""
    results = [replace(r, outcome=o) for r, o in zip(PASSED, first, strict=False)]
    results += PASSED[len(first) :]
    return Report(subject, tests=[r.test for r in results], results=results)


def test_a_run_that_leaves_nothing_out():
    """S-20: the bare word is for the whole suite."""
    assert report().verdict == f"CONFORMANT: {TITLE}: {COUNT} passed"


@pytest.mark.parametrize(
    ("outcomes", "evidence"),
    [
        (("skipped",), f"{COUNT - 1} passed, 1 not asked"),
        (("expected-failure",), f"{COUNT - 1} passed, 1 known failure"),
        (
            ("expected-failure", "skipped", "skipped"),
            f"{COUNT - 3} passed, 1 known failure, 2 not asked",
        ),
    ],
)
def test_what_was_left_out_is_counted(outcomes: tuple[str, ...], evidence: str):
    """S-20: a skip and a known failure are no passes."""
    verdict = report(*outcomes).verdict
    assert verdict == f"CONFORMANT in what was asked: {TITLE}: {evidence}"


def test_core_types_that_were_left_out_are_named():
    """S-20: one element type of three is not the whole."""
    chosen = replace(SUBJECT, dtypes_left_out=["float16", "bfloat16"])
    verdict = report(subject=chosen).verdict
    assert verdict.startswith("CONFORMANT in what was asked: ")
    assert verdict.endswith(f"{COUNT} passed, float16/bfloat16 not asked")


@pytest.mark.parametrize("outcome", ["failed", "unexpected-pass"])
def test_one_failure_is_enough(outcome: str):
    """S-20: of either kind."""
    found = report(outcome)
    assert found.verdict == f"NOT CONFORMANT: {TITLE}: {COUNT - 1} passed, 1 failed"
    assert found.reasons_against == ["1 failing test"]
    assert not found.as_dict()["conformant"]


def test_a_group_that_is_not_there_is_missed():
    """S-20: every group is asked, or its skips say why not."""
    found = report()
    missing = found.results.pop(0)
    found.tests.remove(missing.test)
    assert found.reasons_against == [f"group {missing.group} was not asked"]


def test_a_test_without_a_result_is_missed():
    """S-20: whatever kept it from being answered."""
    found = report()
    found.results.pop()
    assert found.reasons_against == ["1 test was never answered"]
    assert found.verdict.startswith("NOT CONFORMANT: ")
    assert found.verdict.endswith(f"{COUNT - 1} passed, 1 never answered")


def test_what_kept_a_run_from_finishing_speaks_against():
    """S-20: whatever passed."""
    found = report()
    found.errors.append("the process ended")
    assert found.reasons_against == ["the process ended"]
    assert found.verdict.startswith("NOT CONFORMANT: ")


def test_a_partial_run_gives_no_verdict_on_the_backend():
    """S-20: not even where everything that was asked passed."""
    found = report()
    found.deselected = ["test_other"]
    assert found.verdict == f"PASSED in part: {TITLE}: {COUNT} passed, 1 deselected"
    assert not found.as_dict()["conformant"]
    found.errors.append("interrupted")
    assert found.verdict.startswith("FAILED in part: ")


def test_a_run_that_skips_everything_is_no_pass():
    """S-20: nothing was shown."""
    assert "no test ran" in report(*["skipped"] * COUNT).reasons_against


def test_a_backend_that_was_never_loaded_is_named_as_it_was_typed():
    """S-20: nothing else is known of it."""
    assert Report(Subject("mine:create")).verdict == "NOT CONFORMANT: mine:create: 0 passed"
