"""The verdict of a run without all tests states that the run is partial."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import MUTANTS, NINE_HEADS, RIGHT, last_line, report_of, run_suite


@pytest.mark.parametrize(
    "narrowing",
    [
        ("--only", "decode-h16-fp32"),
        ("-k", "decode-h16-fp32"),
        ("-m", "not mla"),
        ("-k", "decode-h16-fp32", "--deselect", f"test_decode.py::{NINE_HEADS}"),
    ],
    ids=["only", "k", "m", "deselect"],
)
def test_a_run_with_a_selection_is_partial(narrowing: tuple[str, ...], tmp_path: Path):
    """S-20: it passes in part at best, and is never conformant."""
    report = report_of(tmp_path, "--backend", RIGHT, *narrowing)
    assert "in part: " in report["verdict"]
    assert f"{len(report['deselected'])} skipped by selection" in report["verdict"]
    assert report["deselected"]
    assert not report["conformant"]
    asked = report["totals"]["all"]
    assert report["status"] == (0 if asked else 1)
    assert report["verdict"].startswith("PASSED" if asked else "FAILED")


def test_a_run_that_stops_early_is_partial(tmp_path: Path):
    """S-20: ``-x`` leaves tests without a result."""
    report = report_of(tmp_path, "--backend", f"{MUTANTS}:lse-in-base-2", "-x")
    assert report["status"] == 1
    assert report["verdict"].startswith("FAILED in part: lse-in-base-2")
    assert report["totals"]["failed"] == 1
    assert report["totals"]["unanswered"] > 0
    assert f"{report['totals']['unanswered']} without a result" in report["verdict"]
    assert "The run stopped after 1 failure (-x or --maxfail)." in report["printed"]


def test_options_from_outside_do_not_reach_the_suite(tmp_path: Path):
    """S-20: the suite ignores a variable that selects tests of other runs, and reports it."""
    chosen = ("--backend", RIGHT, "--only", "decode-h16-fp32")
    report = report_of(tmp_path, *chosen, PYTEST_ADDOPTS="-k test_merge")
    assert report["totals"]["passed"] == 1
    assert "PYTEST_ADDOPTS is set; the suite ignores it." in report["printed"]


@pytest.mark.parametrize("more", [(), ("-q",), ("--workers", "2"), ("-v",)])
def test_the_verdict_is_the_last_line(more: tuple[str, ...]):
    """S-20: pytest prints nothing after it."""
    done = run_suite("--backend", RIGHT, "--only", "decode-h16-fp32", *more)
    assert last_line(done.stdout).startswith("PASSED in part: ")
    assert done.stderr == ""
