"""A backend runs no test that needs a feature which it does not declare."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import report_of


@pytest.mark.parametrize("lacking", ["mixed", "padding", "replay", "explicit_slots"])
def test_tests_of_an_undeclared_feature_do_not_run(lacking: str, tmp_path: Path):
    """S-20: a backend that refuses every step with the feature passes all tests that run."""
    large = "200-rows or 300 or 33k or 16k or 5001-keys or wide or production or batch_invariant"
    chosen = f"(invariance or layer or chunks or quarter or bad) and not ({large} or fp8)"
    options = ("--profile", "kernel", "--dtypes", "float32", "-k", chosen)
    report = report_of(tmp_path, "--backend", f"closed:without_{lacking}", *options)
    failed = [result["test"] for result in report["results"] if result["outcome"] == "failed"]
    assert not failed
    assert report["totals"]["passed"]
    assert any(lacking in result.get("reason", "") for result in report["results"])


def test_tests_of_an_undeclared_mask_do_not_run(tmp_path: Path):
    """S-20: bad tree masks do not run on a backend with causal masks, which refuses all trees."""
    chosen = ("--profile", "kernel", "-k", "bad or good or merge")
    report = report_of(tmp_path, "--backend", "causal_only:create", *chosen)
    failed = [result["test"] for result in report["results"] if result["outcome"] == "failed"]
    assert not failed
    skipped = {r["test"]: r["reason"] for r in report["results"] if r["outcome"] == "skipped"}
    assert "mask tree:qlen not declared" in skipped["test_bad_batch[mask-blind-node]"]
    assert "test_the_good_steps_are_good" not in skipped
