"""The adapters in ``conformance/adapters`` on a machine that need not have what they adapt."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_mla_conformance.expected import load_expected_failures

FOLDER = Path(__file__).parents[1]
NEEDS = {"vllm_triton": "vllm", "sglang_triton": "sglang", "flashmla": "flash_mla"}


@pytest.mark.parametrize("adapter", NEEDS)
def test_an_adapter_without_its_package_is_skipped(adapter: str):
    """Who has not installed an engine sees why nothing was asked of it."""
    if importlib.util.find_spec(NEEDS[adapter]):
        pytest.skip(f"{NEEDS[adapter]} is installed")
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "paged_mla_conformance", "--backend", f"adapters.{adapter}:create"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert f"SKIPPED: adapters.{adapter}:create cannot run here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("adapter", NEEDS)
def test_what_is_expected_to_fail_is_what_failed(adapter: str):
    """The adapter's file names every failure of its report, and nothing else."""
    report = json.loads((FOLDER / "reports" / f"h200-{adapter}.json").read_text())
    failed = {
        r["test"] for r in report["results"] if r["outcome"] in {"failed", "expected-failure"}
    }
    path = FOLDER / "adapters" / f"{adapter}.toml"
    expected = set(load_expected_failures(path)) if path.exists() else set()
    assert failed == expected
    assert report["profile"].endswith(",kernel")
