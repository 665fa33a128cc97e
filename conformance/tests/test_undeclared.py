"""A backend is asked nothing that needs a feature which it does not declare."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import report_of


@pytest.mark.parametrize("lacking", ["mixed", "padding", "replay", "explicit_slots"])
def test_nothing_undeclared_is_asked(lacking: str, tmp_path: Path):
    """S-20: one that refuses whatever needs the feature passes what it is asked."""
    large = "200-rows or 300 or 33k or 16k or 5001-keys or wide or production"
    chosen = f"(invariance or layer or chunks or quarter or bad) and not ({large})"
    options = ("--profile", "kernel", "--dtypes", "float32", "-k", chosen)
    report = report_of(tmp_path, "--backend", f"closed:without_{lacking}", *options)
    failed = [result["test"] for result in report["results"] if result["outcome"] == "failed"]
    assert not failed
    assert report["totals"]["passed"]
    assert any(lacking in result.get("reason", "") for result in report["results"])


def test_no_mask_that_is_undeclared_is_asked(tmp_path: Path):
    """S-20: bad input of trees is not put to a backend of causal masks, which refuses them all."""
    chosen = ("--profile", "kernel", "-k", "bad or good or merge")
    report = report_of(tmp_path, "--backend", "causal_only:create", *chosen)
    failed = [result["test"] for result in report["results"] if result["outcome"] == "failed"]
    assert not failed
    skipped = {r["test"]: r["reason"] for r in report["results"] if r["outcome"] == "skipped"}
    assert "mask tree:qlen not declared" in skipped["test_bad_batch[mask-blind-node]"]
    assert "test_the_good_steps_are_good" not in skipped
