"""The documents of a report, also of a run that went wrong."""

from __future__ import annotations

import io
import json
import platform
from dataclasses import replace
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from running import REFERENCE
from test_verdict import SUBJECT, report

from paged_mla_conformance.run import command
from paged_mla_conformance.run.reports import html, junit, summary
from paged_mla_conformance.run.reports.report import SCHEMA, Report, to_json
from paged_mla_conformance.run.subject import Subject, machine
from paged_mla_conformance.run.workers import scheduler
from paged_mla_conformance.run.workers.progress import Progress


def eventful() -> Report:
    """Return a report in which everything there is happened."""
    found = report("failed", "failed", "skipped", "expected-failure", "unexpected-pass")
    died = replace(found.results[0], end="died", message="killed \x00 <by> SIGSEGV", replay="again")
    found.results[0] = replace(died, note="asked with 8 heads")
    found.results[1] = replace(found.results[1], end="timed-out")
    found.warn({"UserWarning: <old> (driver.py:3)": 2}, "test_decode")
    found.warn({"UserWarning: <old> (driver.py:3)": 1}, "test_merge")
    found.errors.append("gave up")
    found.deselected = ["test_b", "test_a"]
    return found


@pytest.mark.parametrize("found", [report(), eventful(), Report(Subject("mine:create"))])
def test_every_report_follows_the_schema(found: Report):
    """S-20: JSON is the source of everything else, so its form is fixed."""
    jsonschema.validate(found.as_dict(), json.loads(SCHEMA.read_text()))


def test_what_happened_is_in_the_document():
    """S-20: ends, warnings and what was left out, in an order that does not depend on the run."""
    document = eventful().as_dict()
    assert (document["totals"]["died"], document["totals"]["timed-out"]) == (1, 1)
    assert document["deselected"] == ["test_a", "test_b"]
    [warned] = document["warnings"]
    assert (warned["count"], warned["first"]) == (3, "test_decode")
    assert [r["test"] for r in document["results"]] == sorted(
        r["test"] for r in document["results"]
    )


def test_a_test_that_passed_is_a_line_of_the_file():
    """S-20: reports are kept and compared, so only what went wrong has more than a line."""
    found = report("passed", "failed")
    checks = [
        {"what": "out", "error": 0.02, "budget": 0.06},
        {"what": "lse", "error": 0.0, "budget": 0.0},
    ]
    found.results[0] = replace(found.results[0], checks=checks, ms=55.663)
    document = found.as_dict()
    of = {result["test"]: result for result in document["results"]}
    assert of[found.results[0].test] == {
        "test": found.results[0].test,
        "group": found.results[0].group,
        "outcome": "passed",
        "worst": 0.333,
        "ms": 55.7,
    }
    assert {"rules", "why", "replay", "checks"} <= of[found.results[1].test].keys()
    text = to_json(document)
    assert json.loads(text) == document
    assert [line for line in text.splitlines() if '"test":' in line] == [
        f"  {json.dumps(result)}" + ("," if result is not document["results"][-1] else "")
        for result in document["results"]
    ]


def test_a_report_names_the_machine_and_never_says_unknown():
    """S-20: whoever compares two reports sees where each was made, also of no backend at all."""
    assert {"system", "processor"} == machine().keys()
    assert platform.system() in machine()["system"]
    assert machine()["processor"].endswith("cores")
    for subject in (SUBJECT, Subject("mine:create")):
        document = Report(subject).as_dict()
        assert machine().items() <= document["environment"].items()
        assert "unknown" not in to_json(document)


def test_the_page_shows_notes_and_warnings():
    """S-20: as text, whatever they hold."""
    page = html.render(eventful().as_dict())
    assert "asked with 8 heads" in page
    assert "UserWarning: &lt;old&gt; (driver.py:3)" in page
    assert "killed \x00 &lt;by&gt; SIGSEGV" in page


def test_junit_counts_failures_and_what_kept_the_run_from_finishing():
    """S-20: who reads JUnit alone sees that the run is no pass."""
    suite = ET.fromstring(junit.render(eventful().as_dict()))
    assert suite.get("failures") == str(len(suite.findall("testcase/failure"))) == "4"
    assert suite.get("tests") == str(len(suite.findall("testcase")))
    assert "gave up" in str(suite.findall("testcase/failure")[-1].text)
    assert junit.render(report().as_dict()).count("<testcase") == len(report().tests)


FAILURE = """\
trial.py:9: in check
    attend()
E   IndexError: index 137 is out of bounds
E   backend raised IndexError in attend: it may have read an entry
E   and more of it"""


@pytest.mark.parametrize("count", [1, 2])
def test_many_failures_are_a_line_each(count: int):
    """A replay of one shows its traceback, as does a run in which it is the only one."""
    found, stream = report("passed", *["failed"] * count), io.StringIO()
    found.results[:] = [
        replace(result, message=FAILURE, replay="paged-mla") if result.fails else result
        for result in found.results
    ]
    summary.write(found, stream)
    assert stream.getvalue().count("attend()") == (count == 1)
    line = "IndexError: index 137 is out of bounds; backend raised IndexError in attend: it may ha"
    assert stream.getvalue().count(f"\n{line}") == (count if count > 1 else 0)
    assert stream.getvalue().count("\nreplay: paged-mla\n") == count


def test_the_summary_ends_with_the_verdict():
    """S-20: after failures with their replay and their note."""
    stream, found = io.StringIO(), eventful()
    summary.write(found, stream)
    lines = stream.getvalue().splitlines()
    assert lines[-1] == found.verdict
    assert {"replay: again", "note: asked with 8 heads", "against: gave up"} <= set(lines)
    assert f"failed: {found.results[0].test}" in lines
    assert any(line.startswith("3 warnings of the backend, first: UserWarning") for line in lines)


class Terminal(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "line"),
    [
        (io.StringIO(), 5.0, ""),
        (io.StringIO(), 20.0, "20 s: 10 of 40 done, 2 failed, about 60 s left\n"),
        (Terminal(), 1.0, "\r1 s: 10 of 40 done, 2 failed, about 3 s left\x1b[K"),
    ],
    ids=["a log, too early", "a log", "a terminal"],
)
def test_progress(stream: io.StringIO, seconds: float, line: str, monkeypatch: pytest.MonkeyPatch):
    """S-20: a log gets a line now and then, a terminal one that moves."""
    clock = iter([0.0, 0.0, seconds])
    monkeypatch.setattr(
        "paged_mla_conformance.run.workers.progress.time.monotonic", lambda: next(clock)
    )
    progress = Progress(stream)
    progress.begin(SUBJECT.title)
    progress.show(10, 40, 2, share=0.25)
    cleared = "\r\x1b[K" if stream.isatty() else ""
    assert stream.getvalue() == f"{cleared}{SUBJECT.title}\n{line}"


def test_progress_before_tests_are_known(monkeypatch: pytest.MonkeyPatch):
    """S-20: loading a backend may take seconds; a terminal shows that something is happening."""
    clock = iter([0.0, 3.0])
    monkeypatch.setattr(
        "paged_mla_conformance.run.workers.progress.time.monotonic", lambda: next(clock)
    )
    stream = Terminal()
    Progress(stream).show(0, 0, 0, share=0.0)
    assert stream.getvalue() == "\r3 s: loading the backend and collecting tests\x1b[K"


def test_the_commit_is_read_before_an_older_report_is_removed(tmp_path, monkeypatch):
    """S-20: a report that lies in a commit, and is made anew, does not make that commit dirty."""
    path = tmp_path / "report.json"
    path.write_text("{}")
    monkeypatch.setattr(command, "commit_of", lambda _: "clean" if path.exists() else "dirty")
    monkeypatch.setattr(command, "Worker", lambda *_, **__: None)
    monkeypatch.setattr(scheduler.Scheduler, "run", lambda _: None)
    command.main(["--backend", REFERENCE, "--report", str(path)])
    assert json.loads(path.read_text())["commit"] == "clean"
