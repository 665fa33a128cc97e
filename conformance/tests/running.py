"""Start the suite as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REFERENCE = "paged_mla_reference.backend:create"
MUTANTS = "paged_mla_conformance.meta.mutants.backends"
RIGHT = f"{MUTANTS}:right"
NINE_HEADS = "test_decode[decode-h9-fp32]"
FEW = ("-k", " or ".join(f"decode-h{heads}-fp32" for heads in (8, 9, 16, 24)))
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def start_suite(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the suite; it can import the backends in the folder of this file."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "paged_mla", "conformance", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def run_suite(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the suite until it ends."""
    with start_suite(*arguments, **environment) as run:
        printed, said = run.communicate()
    return subprocess.CompletedProcess(arguments, run.returncode, printed, said)


def report_of(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run the suite; return its report, with what was printed and the status."""
    path = folder / "report.json"
    done = run_suite(*arguments, "--report", str(path), **environment)
    assert path.exists(), done.stdout + done.stderr
    return {**json.loads(path.read_text()), "printed": done.stdout, "status": done.returncode}


def result_of(report: dict[str, Any], test: str) -> dict[str, Any]:
    """Return the result of a test."""
    [found] = [r for r in report["results"] if r["test"] == test]
    return found


def last_line(printed: str) -> str:
    """Return the last line on the screen."""
    return printed.splitlines()[-1]
