"""One backend put to the suite, then to the search, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ASKED = r"\S+\.json|schedule \d+|production case \d+|drawn from seed \d+"


@dataclass(frozen=True)
class Catch:
    """What noticed a bug.

    Parameters
    ----------
    by : str
        A test id, or what the search drew.
    said : str
        What was wrong.
    seconds : float
        Until then.
    """

    by: str
    said: str
    seconds: float

    @property
    def rule(self) -> str:
        """The rule that was broken, or the error that was raised instead of an answer."""
        found = re.search(r"\[(S-\d+)\]", self.said)
        return found.group(1) if found else self.said.split(":")[0]


def ask_suite(factory: str) -> Catch | None:
    """Return the first test that fails in float32, ``None`` if the backend conforms."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        arguments = ("--dtypes", "float32", "--report", str(path), "-x", "-q")
        done = _run("paged_mla_conformance", factory, arguments)
        if not path.exists():
            raise RuntimeError(f"{factory}: no report\n{done.stdout}{done.stderr}")
        report = json.loads(path.read_text())
    for result in report["results"]:
        if result["outcome"] == "failed":
            errors = re.findall(r"^E +(.+)", result["message"], re.MULTILINE)
            return Catch(result["test"], errors[0], time.monotonic() - start)
    if not report["conformant"]:
        raise RuntimeError(f"{factory}: {report['verdict']}")
    return None


def ask_search(factory: str, minutes: float) -> Catch | None:
    """Return the first failure in so many minutes of two processes, ``None`` if there is none."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--minutes", str(minutes), "--workers", "2", "--folder", folder)
        done = _run("paged_mla_conformance.fuzz", factory, arguments)
    if not done.returncode:
        return None
    found = re.search(rf"^({_ASKED}): (?!right$)(.+)", done.stdout, re.MULTILINE)
    if not found:
        raise RuntimeError(done.stdout + done.stderr)
    return Catch(found.group(1), found.group(2), time.monotonic() - start)


def _run(module: str, factory: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--backend", factory, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
