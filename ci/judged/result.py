"""The result of judging one kernel, with the values that the page shows."""

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
_LONGEST = 400  # the most characters of a sentence


@dataclass(frozen=True)
class Result:
    """The result of judging one kernel.

    Parameters
    ----------
    id : str
        The id of the kernel in the manifest.
    outcome : {"passed", "failed", "not called", "out of time", "ended"}
    seconds : float
        The duration of the run.
    card, torch, commit : str
        The device's name, torch's version, and the commit of the suite; "" if no test was run.
    run, failed, not_asked : int
        The numbers of tests that were run, that failed, and that were not run.
    rules : tuple of str
        The rules of the failed tests, in the order of their numbers.
    sentence : str
        A sentence about the cause of most failures, or the last line that the process printed.
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
    """Return the result of a process that judged a kernel.

    Parameters
    ----------
    kernel : Kernel
    status : int or None
        The exit status of the process; ``None`` if it exceeded the time limit.
    report : dict or None
        The suite's report; ``None`` if the process wrote none.
    screen : str
        The output of the process.
    seconds : float
        The duration of the process.
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
    """Return the sentence about a cause of failures; it has no details about damaged memory."""
    count = cause["count"]
    tests = f"{count} test{'' if count == 1 else 's'}"
    said = f"{cause.get('what', '')} {cause['kind']} {cause['error']}"
    if _CHANGES_MEMORY.search(said):
        return f"S-10: memory changes that the call may not write, in {tests}."
    if not cause.get("rule") and _ENDS_A_PROCESS.search(said):
        return f"S-9: a call ends its process or leaves the device unusable, in {tests}."
    return _short(cause["sentence"])


def _last_of(screen: str) -> str:
    """Return the last line of an output that is not empty, or ""."""
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
        The file cannot be read, or has other fields or values.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(str(path), str(error), "a file that `run` wrote") from error
    found: tuple[Result, ...] = build(tuple[Result, ...], document, str(path))
    return list(found)
