"""A failing run names the known fault that explains each of its first causes."""

from __future__ import annotations

from pathlib import Path

from running import FEW, MUTANTS, report_of

WRONG = f"{MUTANTS}:scale-of-the-absorbed-width"


def test_the_screen_names_the_fault(tmp_path: Path):
    """S-5: the smallest failing step is recorded, and a known fault gives the same output."""
    report = report_of(tmp_path, "--backend", WRONG, *FEW)
    assert "   looks like: Matches every bit: " in report["printed"]
    assert "scale-of-the-absorbed-width (The softmax scale is (R + P) ** -0.5)" in report["printed"]
    assert "scale-of-the-absorbed-width" in report["causes"][0]["fault"]
    [page] = tmp_path.glob("*.html")
    assert "Looks like: " in page.read_text()


def test_one_fault_explains_several_causes(tmp_path: Path):
    """S-5, S-7: a wrong scale makes `out` wrong in some cases and only `lse` in others."""
    report = report_of(tmp_path, "--backend", WRONG, "--quick")
    assert len(report["causes"]) > 1
    assert "One fault explains the first causes: Matches all " in report["printed"]
    assert "scale-of-the-absorbed-width" in report["shared_fault"]


def test_a_fault_that_nothing_explains_is_not_named(tmp_path: Path):
    """If no fault explains a cause, the screen has no line about a fault."""
    report = report_of(tmp_path, "--backend", "noisy:create", *FEW)
    assert "looks like" not in report["printed"]
    assert not report["causes"][0]["fault"]


def test_a_dependence_on_earlier_calls_is_reported(tmp_path: Path):
    """S-17: a test that failed in the run passes in a new process."""
    names = "decode-h8-fp32 or decode-h8-bs1-fp32 or decode-1-key-fp32 or decode-bs"
    report = report_of(tmp_path, "--backend", "forgetful:create", "-k", names)
    assert any("depends on earlier calls" in cause["fault"] for cause in report["causes"])
