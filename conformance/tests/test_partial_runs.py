"""A run that asks less than everything says so, however it came to that."""

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
def test_a_narrowed_run_says_so(narrowing: tuple[str, ...], tmp_path: Path):
    """S-20: it passes in part at best, and is never conformant."""
    report = report_of(tmp_path, "--backend", RIGHT, *narrowing)
    assert "in part: " in report["verdict"]
    assert f"{len(report['deselected'])} deselected" in report["verdict"]
    assert report["deselected"]
    assert not report["conformant"]
    asked = report["totals"]["all"]
    assert report["status"] == (0 if asked else 1)
    assert report["verdict"].startswith("PASSED" if asked else "FAILED")


def test_a_run_that_stops_early_says_so(tmp_path: Path):
    """S-20: ``-x`` leaves tests without a result."""
    report = report_of(tmp_path, "--backend", f"{MUTANTS}:lse-in-base-2", "-x")
    assert report["status"] == 1
    assert report["verdict"].startswith("FAILED in part: lse-in-base-2")
    assert report["totals"]["failed"] == 1
    assert report["totals"]["unanswered"] > 0
    assert f"{report['totals']['unanswered']} never answered" in report["verdict"]


def test_options_from_outside_do_not_reach_the_suite(tmp_path: Path):
    """S-20: a variable that narrows other test runs is not used, which is said."""
    chosen = ("--backend", RIGHT, "--only", "decode-h16-fp32")
    report = report_of(tmp_path, *chosen, PYTEST_ADDOPTS="-k test_merge")
    assert report["totals"]["passed"] == 1
    assert "PYTEST_ADDOPTS is set and not used" in report["printed"]


@pytest.mark.parametrize("more", [(), ("-q",), ("--workers", "2"), ("-v",)])
def test_the_verdict_is_the_last_line(more: tuple[str, ...]):
    """S-20: nothing of pytest's comes after it."""
    done = run_suite("--backend", RIGHT, "--only", "decode-h16-fp32", *more)
    assert last_line(done.stdout).startswith("PASSED in part: ")
    assert done.stderr == ""
