"""The backend that bugs are planted in, and one of the bugs, where torch is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="planted bugs need torch"
)


def _ask(factory: str, test: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    backend = ("--backend", f"planted.{factory}", "--only", test)
    return subprocess.run(
        [sys.executable, "-m", "paged_mla", "conformance", *backend],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.parametrize(
    "test",
    [
        "test_mixed[mixed-bs16-fp16]",
        "test_masks[masks-tree-qlen-ragged-padded-fp32]",
        "test_rope[rope-neox-yarn-fp32]",
        "test_replay[replay-8-3-1-8-bf16]",
        "test_large_offsets[large_offsets-4g-extend-fp32]",
    ],
)
def test_the_backend_without_a_bug_is_right(test: str):
    """What a planted bug is caught for is the bug."""
    done = _ask("torch_backend:create", test)
    assert "PASSED in part: " in done.stdout
    assert ": 1 passed, " in done.stdout


def test_a_planted_bug_fails():
    """S-4: a lost key is noticed."""
    done = _ask("sets:lost-tail", "test_decode[decode-sweep-bs16-fp32]")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "0 passed, 1 failed" in done.stdout
