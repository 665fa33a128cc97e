"""What was found of one kernel, in the few values that the page shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ci.judged.manifest import Kernel
from paged_mla_shared.documents import one_line
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build

PASSED, FAILED, NOT_CALLED = "passed", "failed", "not called"
OUT_OF_TIME, ENDED = "out of time", "ended"
_STATUSES = {0: PASSED, 1: FAILED, 2: NOT_CALLED}
_ENDS_A_PROCESS = re.compile(
    r"CUDA error|illegal|misaligned|Segmentation|signal|\bdied\b|\bended\b", re.IGNORECASE
)
_CHANGES_MEMORY = re.compile(r"bytes? written|was changed|changed bytes", re.IGNORECASE)
_LONGEST = 400  # characters of a sentence


@dataclass(frozen=True)
class Result:
    """What was found of one kernel.

    Parameters
    ----------
    id : str
        Of the manifest.
    outcome : {"passed", "failed", "not called", "out of time", "ended"}
    seconds : float
    card, torch, commit : str
        The device's name, torch's version, and the commit of the suite; "" where nothing was asked.
    run, failed, not_asked : int
        Numbers of tests.
    rules : tuple of str
        Those that a failing test names, in order.
    sentence : str
        About the cause of most failing tests, or the last line of the screen.
    """

    id: str
    outcome: str
    seconds: float
    card: str = ""
    torch: str = ""
    commit: str = ""
    run: int = 0
    failed: int = 0
    not_asked: int = 0
    rules: tuple[str, ...] = ()
    sentence: str = ""


def result_of(
    kernel: Kernel,
    status: int | None,
    report: Mapping[str, Any] | None,
    screen: str,
    seconds: float,
) -> Result:
    """Return what a process found.

    Parameters
    ----------
    kernel : Kernel
    status : int or None
        Its exit status; ``None`` when time was out.
    report : dict or None
        The suite's report, where it was written.
    screen : str
        What it printed.
    seconds : float
    """
    outcome = OUT_OF_TIME if status is None else _STATUSES.get(status, ENDED)
    if report is None:
        return Result(kernel.id, outcome, round(seconds, 1), sentence=_last_of(screen))
    causes, totals = report.get("causes", []), report["totals"]
    rules = {cause["rule"] for cause in causes if cause.get("rule")}
    return Result(
        id=kernel.id,
        outcome=outcome,
        seconds=round(seconds, 1),
        card=report["backend"]["device"],
        torch=report["environment"].get("torch", ""),
        commit=report.get("commit", ""),
        run=totals["run"],
        failed=totals["failed"],
        not_asked=totals["skipped"],
        rules=tuple(sorted(rules, key=lambda rule: int(rule.partition("-")[2]))),
        sentence=sentence_of(causes[0]) if causes else "",
    )


def sentence_of(cause: Mapping[str, Any]) -> str:
    """Return what the page says of a cause: where memory is damaged, not how that comes about."""
    count = cause["count"]
    tests = f"{count} test{'' if count == 1 else 's'}"
    said = f"{cause.get('what', '')} {cause['kind']} {cause['error']}"
    if _CHANGES_MEMORY.search(said):
        return f"S-10: memory changes that the call may not write, in {tests}."
    if not cause.get("rule") and _ENDS_A_PROCESS.search(said):
        return f"S-9: a call ends its process or leaves the device unusable, in {tests}."
    return _short(cause["sentence"])


def _last_of(screen: str) -> str:
    """Return the last line of a screen that says something."""
    lines = [line.strip() for line in screen.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else ""


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def write_all(results: Iterable[Result], path: Path) -> None:
    """Write results as JSON, in the order of their ids."""
    ordered = sorted(results, key=lambda result: result.id)
    text = json.dumps([asdict(result) for result in ordered], indent=1)
    part = path.with_suffix(".part")
    part.write_text(f"{text}\n")
    part.replace(path)


def read_all(path: Path) -> list[Result]:
    """Return the results of a file.

    Raises
    ------
    InvalidArgument
        It cannot be read, or holds other values.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(str(path), str(error), "a file that `run` wrote") from error
    found: tuple[Result, ...] = build(tuple[Result, ...], document, str(path))
    return list(found)
