"""The documents of a report, also of a run with errors."""

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
    """Return a report with every outcome, end and kind of error."""
    found = report("failed", "failed", "skipped", "expected-failure", "unexpected-pass")
    died = replace(found.results[0], end="died", message="killed \x00 <by> SIGSEGV", replay="again")
    found.results[0] = replace(died, note="num_heads 8, not 6")
    found.results[1] = replace(found.results[1], end="timed-out")
    found.warn({"UserWarning: <old> (driver.py:3)": 2}, "test_decode")
    found.warn({"UserWarning: <old> (driver.py:3)": 1}, "test_merge")
    found.errors.append("gave up")
    found.deselected = ["test_b", "test_a"]
    return found


@pytest.mark.parametrize("found", [report(), eventful(), Report(Subject("mine:create"))])
def test_every_report_follows_the_schema(found: Report):
    """S-20: HTML and JUnit XML are rendered from the JSON document, so its form is fixed."""
    jsonschema.validate(found.as_dict(), json.loads(SCHEMA.read_text()))


def test_the_document_contains_ends_warnings_and_deselected_tests():
    """S-20: they are in an order that does not depend on the run."""
    document = eventful().as_dict()
    assert (document["totals"]["died"], document["totals"]["timed-out"]) == (1, 1)
    assert document["deselected"] == ["test_a", "test_b"]
    [warned] = document["warnings"]
    assert (warned["count"], warned["first"]) == (3, "test_decode")
    assert [r["test"] for r in document["results"]] == sorted(
        r["test"] for r in document["results"]
    )


def test_a_test_that_passed_is_a_line_of_the_file():
    """S-20: reports are stored and compared, so only failures have more than one line."""
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


def test_a_report_always_names_the_machine():
    """S-20: the machine is also named if no backend was loaded."""
    assert {"system", "processor"} == machine().keys()
    assert platform.system() in machine()["system"]
    assert machine()["processor"].endswith("cores")
    for subject in (SUBJECT, Subject("mine:create")):
        document = Report(subject).as_dict()
        assert machine().items() <= document["environment"].items()
        assert "unknown" not in to_json(document)


def test_the_page_shows_notes_and_warnings():
    """S-20: notes and warnings are escaped."""
    page = html.render(eventful().as_dict())
    assert "num_heads 8, not 6" in page
    assert "UserWarning: &lt;old&gt; (driver.py:3)" in page
    assert "killed \x00 &lt;by&gt; SIGSEGV" in page


def test_junit_counts_failures_and_errors_of_the_run():
    """S-20: the JUnit file alone shows that the run did not pass."""
    suite = ET.fromstring(junit.render(eventful().as_dict()))
    assert suite.get("failures") == str(len(suite.findall("testcase/failure"))) == "4"
    assert suite.get("tests") == str(len(suite.findall("testcase")))
    assert "gave up" in str(suite.findall("testcase/failure")[-1].text)
    assert junit.render(report().as_dict()).count("<testcase") == len(report().tests)


def test_the_page_and_junit_use_the_words_of_the_screen():
    """S-20: the results are passed, failed, skipped and not supported."""
    found = report("skipped", "skipped", "expected-failure", "unexpected-pass")
    found.results[0] = replace(found.results[0], reason="merge not declared (core)")
    found.results[1] = replace(found.results[1], reason="left out")
    document = found.as_dict()
    suite = ET.fromstring(junit.render(document))
    messages = {str(skipped.get("message")) for skipped in suite.findall("testcase/skipped")}
    expected = "failed (expected): "
    assert messages == {"not supported: merge not declared (core)", "skipped: left out", expected}
    assert suite.findall("testcase/failure")[0].get("message") == "failed"
    page = html.render(document)
    assert '<td class="skipped">not supported</td>' in page
    assert '<td class="skipped">skipped</td>' in page
    assert '<td class="expected-failure">failed (expected)</td>' in page
    assert '<td class="unexpected-pass">failed</td>' in page
    counts = f"{len(found.results) - 4} passed, 1 failed, 1 failed (expected)"
    assert f"<td>{counts}, 1 not supported, 1 skipped</td>" in page


FAILURE = """\
trial.py:9: in check
    attend()
E   IndexError: index 137 is out of bounds
E   backend raised IndexError in attend: it may have read an entry
E   and more of it"""


def failing(count: int, *, message: str = FAILURE) -> Report:
    """Return a report in which `count` tests failed for one reason."""
    found = report("passed", *["failed"] * count)
    found.results[:] = [
        replace(result, message=message, replay="paged-mla") if result.fails else result
        for result in found.results
    ]
    return found


def screen(found: Report) -> list[str]:
    """Return the lines of the summary."""
    stream = io.StringIO()
    summary.write(found, stream)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_failures_of_one_cause_are_one_cause(count: int):
    """S-20: for any number of failed tests, the screen has their cause once and no traceback."""
    lines = screen(failing(count))
    line = "   error: IndexError: index 137 is out of bounds; backend raised IndexError in attend"
    assert [text for text in lines if text.startswith(line)] == [lines[2]]
    assert lines[0].startswith(
        "1. attend: exception IndexError: index N is out of bounds in "
        f"{count} test{'' if count == 1 else 's'}"
    )
    assert lines.count("   replay: paged-mla") == 1
    assert not any("attend()" in text for text in lines)


def test_the_only_test_of_a_run_is_shown_whole():
    """The output of a replay contains its traceback."""
    found = failing(1)
    found.results[:] = [result for result in found.results if result.fails]
    lines = screen(found)
    assert [text.strip() for text in lines].count("attend()") == 1
    assert "replay: paged-mla" in lines


def test_the_screen_has_at_most_forty_lines():
    """S-20: the screen counts everything else, and the report contains it."""
    found = failing(15)
    for number, result in enumerate(found.results):
        if result.fails:
            text = f"E   {chr(65 + number)}Error: {'far too long to be read ' * 30}"
            found.results[number] = replace(result, message=text, replay="paged-mla")
    more = [replace(found.results[0], test=f"x{n}") for n in range(30)]
    found.results += [
        replace(r, outcome="skipped", reason=f"reason {n}, {'long ' * 60}")
        for n, r in enumerate(more[:20])
    ]
    found.results += [replace(r, outcome="expected-failure", reason="known") for r in more[20:]]
    found.errors += [f"reason {n}" for n in range(9)]
    lines = screen(found)
    assert len(lines) <= summary.MOST_LINES
    assert all(len(line) <= summary.WIDTH for line in lines[:-1])
    assert lines[-1] == found.verdict
    shown = [line for line in lines if line[0].isdigit() and ". " in line[:4]]
    rest = 15 - len(shown)
    assert f"{rest} more causes, of {rest} failing tests, are in the report (--report)." in lines
    assert len(found.as_dict()["causes"]) == 15
    assert sum(line.startswith("skipped, ") for line in lines) == 5
    assert "skipped, 16 tests: 16 other reasons, in the report" in lines
    assert "7 more expected failures are in the report." in lines
    assert sum(line.startswith("problem: ") for line in lines) == 5
    assert f"problem: {len(found.reasons_against) - 4} other reasons, in the report" in lines


def test_the_screen_states_each_broken_rule_once():
    """S-20: the text of a rule appears once, at its first cause."""
    found = failing(3)
    for number, result in enumerate(found.results):
        if result.fails:
            what = ("out", "lse", "out")[number % 3]
            text = f"E   Mismatch: [S-7] {what}: bits differ {'at' if number else 'near'}"
            found.results[number] = replace(result, message=text)
    stated = [line for line in screen(found) if line.startswith("   S-7: lse is the natural log")]
    assert len(found.causes) > 1
    assert len(stated) == 1


def test_the_output_of_a_process_is_complete_if_no_test_failed():
    """S-20: if a backend does not load, the output of its process is the only information."""
    said = "\n".join(f"line {number}" for number in range(30))
    for found, whole in ((report(), True), (failing(2), False)):
        found.errors.append(f"pytest stopped: {said}")
        lines = screen(found)
        assert ("line 29" in lines) == whole
        assert "line 1" in lines
        assert len(lines) <= summary.MOST_LINES


def test_tests_that_are_not_supported_are_pooled():
    """S-20: values that are not declared are listed; the reason of the most tests is first."""
    found = report(*["skipped"] * 4)
    reasons = [
        "num_heads 9 not declared; block_size 3 not declared (core)",
        "layer not declared (optional in mode cpu)",
        "num_heads 24 not declared (core)",
        "num_heads 9 not declared (core)",
    ]
    for number, reason in enumerate(reasons):
        found.results[number] = replace(found.results[number], reason=reason)
    assert [line for line in screen(found) if line.startswith("not supported")] == [
        "not supported, 3 tests: num_heads 9, 24 not declared (core)",
        "not supported, 1 test: layer not declared (optional in mode cpu)",
    ]


def test_the_summary_ends_with_the_verdict():
    """S-20: the causes with their replay commands and notes come before the verdict."""
    found = eventful()
    lines = screen(found)
    assert lines[-1] == found.verdict
    assert {"   replay: again", "problem: gave up"} <= set(lines)
    assert any(f"smallest: {found.results[0].test}: " in line for line in lines)
    assert any("(num_heads 8, not 6)" in line for line in lines)
    warned = "3 warnings from the backend; the first (test_decode): UserWarning"
    assert any(line.startswith(warned) for line in lines)


def test_the_page_begins_with_the_causes():
    """S-20: the causes come before the other sections, as on the screen."""
    page = html.render(failing(3).as_dict())
    assert (
        page.index("<h2>Causes</h2>") < page.index("exception IndexError") < page.index("<h2>What")
    )
    assert "<h2>Causes</h2>" not in html.render(report().as_dict())


def test_a_group_that_failed_is_not_called_exact():
    """S-20: an error of 0 % means that values were compared and were right."""
    found = report("failed", "passed", "skipped")
    check = {"what": "out", "error": 0.0, "budget": 1.0}
    found.results[0] = replace(found.results[0], checks=[check])
    found.results[1] = replace(found.results[1], checks=[check])
    groups = {group.name: group.worst for group in html.groups_of(found.as_dict())}
    names = [result.group for result in found.results[:3]]
    assert [groups[name] for name in names] == ["1 failed", "0%", "nothing compared"]
    page = html.render(found.as_dict())
    line = page[page.index(f"<td><code>{found.results[0].test}") :]
    assert "0%" not in line[: line.index("</tr>")]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

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
    """S-20: a log gets a line every 10 s; a terminal gets a line that is updated."""
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
    """S-20: the line states that the backend is loaded, which may take seconds."""
    clock = iter([0.0, 3.0])
    monkeypatch.setattr(
        "paged_mla_conformance.run.workers.progress.time.monotonic", lambda: next(clock)
    )
    stream = Terminal()
    Progress(stream).show(0, 0, 0, share=0.0)
    assert stream.getvalue() == "\r3 s: loading the backend and collecting tests\x1b[K"


def test_the_commit_is_read_before_an_older_report_is_removed(tmp_path, monkeypatch):
    """S-20: writing a committed report again does not make the commit dirty."""
    path = tmp_path / "report.json"
    path.write_text("{}")
    monkeypatch.setattr(command, "commit_of", lambda _: "clean" if path.exists() else "dirty")
    monkeypatch.setattr(command, "Worker", lambda *_, **__: None)
    monkeypatch.setattr(scheduler.Scheduler, "run", lambda _: None)
    command.main(["--backend", REFERENCE, "--report", str(path)])
    assert json.loads(path.read_text())["commit"] == "clean"
