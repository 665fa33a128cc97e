"""One backend put to the suite, then to the search, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from paged_mla_conformance.fuzz.corpus import is_case, load_case
from paged_mla_shared.cases.case import Case


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


def ask_search(factory: str, seconds: float) -> Catch | None:
    """Return the first failure in `seconds`, over seeds 0, 1, ..; ``None`` if there is none."""
    start = time.monotonic()
    for seed in count():
        left = start + seconds - time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("--seed", str(seed), "--first", str(20 * seed), "--folder", folder)
            try:
                done = _run("paged_mla_conformance.fuzz", factory, arguments, max(left, 0.0))
            except subprocess.TimeoutExpired:
                return None
            if done.returncode:
                by, said = _failure(done, Path(folder))
                return Catch(by, said, time.monotonic() - start)
    raise AssertionError("seeds do not end")


def _run(
    module: str, factory: str, arguments: Sequence[str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--backend", factory, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def _failure(done: subprocess.CompletedProcess[str], folder: Path) -> tuple[str, str]:
    """Return what the search asked when it failed, and what it said of it."""
    listed = re.search(r"^(schedule \d+|\S+\.json): (?!right$)(.+)", done.stdout, re.MULTILINE)
    if listed:
        return listed.group(1), listed.group(2)
    searched = re.search(r"^hypothesis: \d.*\n(?:hypothesis: .*\n)*(.+)", done.stdout, re.MULTILINE)
    if not searched:
        raise RuntimeError(done.stdout + done.stderr)
    return _drawn(next(folder.glob("*.json"))), searched.group(1)


def _drawn(path: Path) -> str:
    """Return what makes a drawn case unlike the plainest one; rows as seq_len/query_len."""
    if not is_case(path):
        return "a drawn schedule"
    case, dtype = load_case(path)
    rows = [" ".join(f"{r.seq_len}/{r.query_len}" for r in s) for s in (case.rows, *case.then)]
    told = {"group", "name", "why", "rules", "rows", "then"}
    others = {f.name: getattr(case, f.name) for f in fields(Case) if f.name not in told}
    plain: Any = {f.name: f.default for f in fields(Case)}
    unlike = [f"{name} {value}" for name, value in others.items() if value != plain[name]]
    return ", ".join([dtype, f"rows {' then '.join(rows)}", *unlike])
