"""Whole runs, as users start them: verdicts, exit codes, reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from paged_mla_conformance import html
from paged_mla_conformance.profile import SUITE_GROUPS
from paged_mla_conformance.report import SCHEMA, versions

REFERENCE = "paged_mla_reference.backend:create"
MUTANTS = "paged_mla_conformance.mutants.backends"
HERE = Path(__file__).parent


def run_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "paged_mla_conformance", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object], Path]:
    """The reference through its own suite, on two workers."""
    path = tmp_path_factory.mktemp("report") / "reference.json"
    done = run_suite("--backend", REFERENCE, "--report", str(path), "--workers", "2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout, json.loads(path.read_text()), path


def test_the_reference_passes_its_own_suite(whole):
    """The oracle, put to the suite as a backend, conforms in every group."""
    stdout, report, _ = whole
    assert report["conformant"]
    assert report["totals"]["failed"] == 0
    assert {r["group"] for r in report["results"]} == set(SUITE_GROUPS)
    last = [line for line in stdout.splitlines() if line][-1]
    assert "CONFORMANT: paged-mla-reference" in stdout
    assert "passed" in last


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
    report_path = tmp_path / "r.json"
    done = run_suite(
        *("--backend", f"{MUTANTS}:lse-in-base-2", "--report", str(report_path)),
        *("-k", "test_decode and h16"),
    )
    assert done.returncode == 1
    assert "NOT CONFORMANT: lse-in-base-2" in done.stdout
    report = json.loads(report_path.read_text())
    failed = next(r for r in report["results"] if r["outcome"] == "failed")
    assert "[S-7] lse" in failed["message"]
    assert failed["replay"].endswith(f"--only '{failed['test']}'")


def test_a_missing_core_capability_does_not_conform():
    """Skipping is not passing."""
    done = run_suite("--backend", "causal_only:create", "-k", "masks")
    assert done.returncode == 1
    assert "core capability missing: mask tree:qlen not declared (core)" in done.stdout


def test_a_partial_run_gives_no_verdict_on_the_backend():
    """``--only`` replays one case."""
    done = run_suite("--backend", REFERENCE, "--only", "decode-h16-bf16")
    assert done.returncode == 0
    assert "PASSED (one case)" in done.stdout
    assert "1 run" in done.stdout


def test_a_narrowed_run_is_not_conformant():
    """A run that leaves groups out cannot say that the backend conforms."""
    done = run_suite("--backend", REFERENCE, "-k", "merge")
    assert done.returncode == 1
    assert "group decode was not asked" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "no.such.module:create"), "No module named"),
        (("--backend", "paged_mla_reference.backend:absent"), "has no attribute"),
        (("--backend", "paged_mla_reference.backend"), "allowed: MODULE:FACTORY"),
        (("--backend", REFERENCE, "--only", "decode-h17-fp4"), "no test or case is called"),
        (("--backend", REFERENCE, "--dtypes", "fp4"), "allowed: float32,float16,bfloat16"),
    ],
    ids=["module", "factory", "form", "only", "dtypes"],
)
def test_usage_errors_say_what_is_wrong(arguments: tuple[str, ...], message: str):
    """Nothing runs on a wrong command line."""
    done = run_suite(*arguments)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("no_package:create", "No module named 'a_package_nobody_has'"),
        ("no_device:create", "no such device"),
    ],
    ids=["package", "device"],
)
def test_a_backend_that_cannot_run_here_is_skipped(backend: str, reason: str):
    """Neither conformant nor not: the reason is printed, and the status says that nothing ran."""
    done = run_suite("--backend", backend)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert f"SKIPPED: {backend} cannot run here: {reason}" in done.stdout + done.stderr


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
    """It shows in the totals and in the summary, with its reason."""
    test = "test_decode[decode-h16-fp32]"
    done = run_suite(
        *("--backend", f"{MUTANTS}:lse-in-base-2", "--only", test),
        *("--expected-failures", expected_file(tmp_path, test)),
    )
    assert done.returncode == 0, done.stdout
    assert "1 expected-failed of 1" in done.stdout
    assert "lse is base 2" in done.stdout


def test_an_unexpected_pass_fails(tmp_path: Path):
    """The file is strict: a repaired defect must leave it."""
    test = "test_decode[decode-h16-bf16]"
    done = run_suite(
        *("--backend", REFERENCE, "--only", test),
        *("--expected-failures", expected_file(tmp_path, test)),
    )
    assert done.returncode == 1
    assert "unexpected-pass" in done.stdout


def test_an_expected_failure_must_be_a_test(tmp_path: Path):
    """Entries that match nothing are an error, not a silence."""
    done = run_suite(
        *("--backend", REFERENCE, "--only", "decode-h16-bf16"),
        *("--expected-failures", expected_file(tmp_path, "test_decode[decode-*]")),
    )
    assert done.returncode != 0
    assert "expected failures that are no test" in done.stdout + done.stderr
