"""Whole runs: verdicts and reports."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from running import FEW, MUTANTS, REFERENCE, last_line, report_of, result_of, run_suite

from paged_mla_conformance.run.reports import html
from paged_mla_conformance.run.reports.report import SCHEMA
from paged_mla_conformance.run.subject import versions
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object], Path]:
    """Run the suite on the reference in bfloat16 with two workers; return output and report."""
    path = tmp_path_factory.mktemp("report") / "reference.json"
    few = ("--dtypes", "bfloat16", "--workers", "2")
    done = run_suite("--backend", REFERENCE, "--report", str(path), *few)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout, json.loads(path.read_text()), path


def test_the_reference_passes_its_own_suite(whole):
    """The reference, as a backend, conforms in every group."""
    stdout, report, _ = whole
    assert report["conformant"]
    assert report["totals"]["failed"] == 0
    assert {r["group"] for r in report["results"]} == set(SUITE_GROUPS)
    assert last_line(stdout) == report["verdict"]
    evidence = r"CONFORMANT with exclusions: .*: \d+ passed, float32/float16 skipped \(--dtypes\)"
    assert re.fullmatch(evidence, report["verdict"])


def test_the_report_follows_its_schema(whole):
    """HTML and JUnit XML are rendered from the JSON report, so its form is fixed."""
    _, report, _ = whole
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))


def test_the_page_is_self_contained(whole):
    """The HTML page needs no other file and names every group."""
    _, report, path = whole
    page = path.with_suffix(".html").read_text()
    assert page == html.render(report)
    assert "http" not in page.replace(report["verdict"], "")
    assert all(group in page for group in SUITE_GROUPS)


def test_huge_caches_go_to_one_process(tmp_path):
    """In several processes on a device, each would take memory that another one found free."""
    only = ("-k", "large_offsets or decode-h9-fp32", "--workers", "3")
    report = report_of(tmp_path, "--backend", "naming_itself:create", *only)
    refused = [r["message"] for r in report["results"] if r["outcome"] == "failed"]
    assert len(refused) > 3
    assert len({re.search(r"prepared in process \d+", message)[0] for message in refused}) == 1
    assert report["totals"]["passed"] > 0


def test_versions_are_those_of_imported_modules(monkeypatch):
    """The report has the version of the imported module, not of the installed package."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="0.1+mine"))
    assert versions()["triton"] == "0.1+mine"


def test_junit_is_written_next_to_the_report(whole):
    """The JUnit file has a test case for each test."""
    _, report, path = whole
    assert path.with_suffix(".xml").read_text().count("<testcase") == report["totals"]["all"]


def test_a_wrong_backend_does_not_conform(tmp_path: Path):
    """One failing case makes a run fail; the report has the command that replays it."""
    report = report_of(tmp_path, "--backend", f"{MUTANTS}:lse-in-base-2", "-k", "decode-h16-fp32")
    assert report["status"] == 1
    assert report["verdict"].startswith("FAILED in part: lse-in-base-2")
    [failed] = report["results"]
    assert "[S-7] lse" in failed["message"]
    assert failed["replay"].endswith(f"--only '{failed['test']}'")


def test_a_missing_core_capability_does_not_conform():
    """A core capability that is not declared makes the run fail."""
    done = run_suite("--backend", "causal_only:create", "-k", "masks")
    assert done.returncode == 1
    [against] = [line for line in done.stdout.splitlines() if "core capability" in line]
    assert against == (
        "problem: core capability missing: "
        "mask non_causal, tree:full, tree:packed, tree:qlen not declared (core)"
    )


ENTRY = """
[[expected_failure]]
test = "{test}"
reason = "lse is base 2"
issue = "https://example.org/1"
"""


def expected_file(folder: Path, test: str) -> str:
    path = folder / "expected.toml"
    path.write_text(ENTRY.format(test=test))
    return str(path)


def test_an_expected_failure_is_counted_as_such(tmp_path: Path):
    """The verdict counts it, and the summary has its reason."""
    test = "test_decode[decode-h16-fp32]"
    done = run_suite(
        *("--backend", f"{MUTANTS}:lse-in-base-2", "--only", test),
        *("--expected-failures", expected_file(tmp_path, test)),
    )
    assert done.returncode == 0, done.stdout
    assert "0 passed, 1 failed (expected)" in last_line(done.stdout)
    assert f"failed (expected): {test}: lse is base 2" in done.stdout


def test_accepted_bad_input_can_be_expected(tmp_path: Path):
    """A missing error for bad input is a failure and not a crash."""
    test = "test_bad_batch[q-pe-dtype]"
    known = ("--expected-failures", expected_file(tmp_path, test))
    done = run_suite("--backend", "meddling:casts-queries", "--only", test, *known)
    assert done.returncode == 0, done.stdout
    assert "0 passed, 1 failed (expected)" in last_line(done.stdout)


def test_a_crash_cannot_be_expected(tmp_path: Path):
    """Only wrong outputs can be expected failures, not exceptions of a backend."""
    test = "test_decode[decode-h16-fp32]"
    known = ("--expected-failures", expected_file(tmp_path, test))
    done = run_suite("--backend", "meddling:raises", "--only", test, *known)
    assert done.returncode == 1, done.stdout


def test_an_unexpected_pass_fails(tmp_path: Path):
    """A repaired defect must be removed from the file."""
    test = "test_decode[decode-h16-bf16]"
    report = report_of(
        tmp_path,
        *("--backend", REFERENCE, "--only", test),
        *("--expected-failures", expected_file(tmp_path, test)),
    )
    assert report["status"] == 1
    assert result_of(report, test)["outcome"] == "unexpected-pass"


def test_an_expected_failure_must_be_a_test(tmp_path: Path):
    """An entry that matches no test is an error."""
    done = run_suite(
        *("--backend", REFERENCE, "--only", "decode-h16-bf16"),
        *("--expected-failures", expected_file(tmp_path, "test_decode[decode-*]")),
    )
    assert done.returncode != 0
    assert "the suite has no test with the ids" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("workers", "given", "threads"),
    [
        ("2", None, str(max(1, (os.cpu_count() or 1) // 2))),
        ("2", "7", "7"),
        ("1", None, str(os.cpu_count() or 1)),
    ],
    ids=["shared", "as-told", "alone"],
)
def test_processes_share_the_processors(tmp_path, monkeypatch, workers, given, threads):
    """If every process used all processors, the processes would slow each other down."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    report = report_of(
        tmp_path,
        *("--backend", "counting_threads:create", "--workers", workers, *FEW),
        **environment,
    )
    assert report["backend"]["version"] == threads
