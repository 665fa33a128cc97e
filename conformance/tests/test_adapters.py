"""The adapters in ``conformance/adapters`` on a machine that need not have what they adapt."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
NEEDS = {"vllm_triton": "vllm", "sglang_triton": "sglang", "flashmla": "flash_mla"}


@pytest.mark.parametrize("adapter", NEEDS)
def test_an_adapter_without_its_package_is_skipped(adapter: str):
    """S-20: who has not installed an engine sees why nothing was asked of it."""
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
