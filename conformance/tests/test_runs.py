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
    """The reference through its own suite in bfloat16, on two workers."""
    path = tmp_path_factory.mktemp("report") / "reference.json"
    few = ("--dtypes", "bfloat16", "--workers", "2")
    done = run_suite("--backend", REFERENCE, "--report", str(path), *few)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout, json.loads(path.read_text()), path


def test_the_reference_passes_its_own_suite(whole):
    """The oracle, put to the suite as a backend, conforms in every group."""
    stdout, report, _ = whole
    assert report["conformant"]
    assert report["totals"]["failed"] == 0
    assert {r["group"] for r in report["results"]} == set(SUITE_GROUPS)
    assert last_line(stdout) == report["verdict"]
    evidence = r"CONFORMANT in what was asked: .*: \d+ passed, float32/float16 not asked"
    assert re.fullmatch(evidence, report["verdict"])


def test_the_report_follows_its_schema(whole):
    """The JSON is the source of everything else, so its form is fixed."""
    _, report, _ = whole
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))


def test_the_page_is_self_contained(whole):
    """The HTML needs no other file and names every group."""
    _, report, path = whole
    page = path.with_suffix(".html").read_text()
    assert page == html.render(report)
    assert "http" not in page.replace(report["verdict"], "")
    assert all(group in page for group in SUITE_GROUPS)


def test_huge_caches_go_to_one_process(tmp_path):
    """Side by side on a device, each would take the memory that another one found free."""
    only = ("-k", "large_offsets or decode-h9-fp32", "--workers", "3")
    report = report_of(tmp_path, "--backend", "naming_itself:create", *only)
    refused = [r["message"] for r in report["results"] if r["outcome"] == "failed"]
    assert len(refused) > 3
    assert len({re.search(r"asked in process \d+", message)[0] for message in refused}) == 1
    assert report["totals"]["passed"] > 0


def test_versions_are_of_what_is_imported(monkeypatch):
    """A module found before the installed one is what ran."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="0.1+mine"))
    assert versions()["triton"] == "0.1+mine"


def test_junit_is_written_beside_the_report(whole):
    """CI systems read JUnit."""
    _, report, path = whole
    assert path.with_suffix(".xml").read_text().count("<testcase") == report["totals"]["all"]


def test_a_wrong_backend_does_not_conform(tmp_path: Path):
    """One failing case is enough; it comes with the command that replays it."""
    report = report_of(tmp_path, "--backend", f"{MUTANTS}:lse-in-base-2", "-k", "decode-h16-fp32")
    assert report["status"] == 1
    assert report["verdict"].startswith("FAILED in part: lse-in-base-2")
    [failed] = report["results"]
    assert "[S-7] lse" in failed["message"]
    assert failed["replay"].endswith(f"--only '{failed['test']}'")


def test_a_missing_core_capability_does_not_conform():
    """Skipping is not passing."""
    done = run_suite("--backend", "causal_only:create", "-k", "masks")
    assert done.returncode == 1
    [against] = [line for line in done.stdout.splitlines() if "core capability" in line]
    assert against == (
        "against: core capability missing: "
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
    """It shows in the verdict and in the summary, with its reason."""
    test = "test_decode[decode-h16-fp32]"
    done = run_suite(
        *("--backend", f"{MUTANTS}:lse-in-base-2", "--only", test),
        *("--expected-failures", expected_file(tmp_path, test)),
    )
    assert done.returncode == 0, done.stdout
    assert "0 passed, 1 known failure" in last_line(done.stdout)
    assert f"known failure: {test}: lse is base 2" in done.stdout


def test_bad_input_that_is_taken_can_be_expected(tmp_path: Path):
    """It is a wrong answer like any other, and no crash."""
    test = "test_bad_batch[q-pe-dtype]"
    known = ("--expected-failures", expected_file(tmp_path, test))
    done = run_suite("--backend", "meddling:casts-queries", "--only", test, *known)
    assert done.returncode == 0, done.stdout
    assert "0 passed, 1 known failure" in last_line(done.stdout)


def test_a_crash_cannot_be_expected(tmp_path: Path):
    """What a backend raises is no wrong answer that somebody looked at."""
    test = "test_decode[decode-h16-fp32]"
    known = ("--expected-failures", expected_file(tmp_path, test))
    done = run_suite("--backend", "meddling:raises", "--only", test, *known)
    assert done.returncode == 1, done.stdout


def test_an_unexpected_pass_fails(tmp_path: Path):
    """The file is strict: a repaired defect must leave it."""
    test = "test_decode[decode-h16-bf16]"
    report = report_of(
        tmp_path,
        *("--backend", REFERENCE, "--only", test),
        *("--expected-failures", expected_file(tmp_path, test)),
    )
    assert report["status"] == 1
    assert result_of(report, test)["outcome"] == "unexpected-pass"


def test_an_expected_failure_must_be_a_test(tmp_path: Path):
    """Entries that match nothing are an error, not a silence."""
    done = run_suite(
        *("--backend", REFERENCE, "--only", "decode-h16-bf16"),
        *("--expected-failures", expected_file(tmp_path, "test_decode[decode-*]")),
    )
    assert done.returncode != 0
    assert "expected failures that are no test" in done.stdout + done.stderr


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
    """Threads of every process on every processor would keep each other from working."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    report = report_of(
        tmp_path,
        *("--backend", "counting_threads:create", "--workers", workers, *FEW),
        **environment,
    )
    assert report["backend"]["version"] == threads
