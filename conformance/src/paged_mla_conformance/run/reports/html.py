"""Render a report as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paged_mla_conformance.run.reports.result import (
    FAILED,
    FAILED_AS_EXPECTED,
    FAILING,
    NOT_SUPPORTED,
    SKIPPED,
    shown_outcome,
)

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)


def write(report: dict[str, Any], path: Path) -> None:
    """Render the JSON report to `path`."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace")


def render(report: dict[str, Any]) -> str:
    """Return the page of a JSON report."""
    left_out = Counter(
        f"{_word(result)}: {result.get('reason', '')}"
        for result in report["results"]
        if result["outcome"] in {"skipped", "expected-failure"}
    )
    page = _TEMPLATES.get_template("report.html")
    ran, groups = _what_ran(report), groups_of(report)
    names = {"ran": ran, "groups": groups, "left_out": left_out, "failing": FAILING}
    return page.render(report, **names, word=_word) + "\n"


def _word(result: dict[str, Any]) -> str:
    return shown_outcome(result["outcome"], result.get("reason", ""))


@dataclass(frozen=True)
class Group:
    """A line in the page's table of groups.

    Parameters
    ----------
    name : str
    passed, failed, skipped, not_supported : int
        How many tests of the group have this result.
    worst : str
        The largest error divided by its budget among the tests that passed, and the number of
        failed tests; "nothing compared" if there is neither.
    ms : float
        How long the tests of the group took, in milliseconds.
    """

    name: str
    passed: int
    failed: int
    skipped: int
    not_supported: int
    worst: str
    ms: float


def groups_of(report: dict[str, Any]) -> list[Group]:
    """Return a line for each group of a JSON report."""
    results: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in report["results"]:
        results[result["group"]].append(result)
    return [_group(name, results[name]) for name in sorted(results)]


def _group(name: str, results: list[dict[str, Any]]) -> Group:
    passed = [result for result in results if result["outcome"] == "passed"]
    failed = sum(result["outcome"] in FAILING for result in results)
    shares = [result["worst"] for result in passed if "worst" in result]
    words = [f"{max(shares):.0%}"] if shares else []
    words += [f"{failed} failed"] if failed else []
    return Group(
        name,
        passed=len(passed),
        failed=failed,
        skipped=sum(_word(result) == SKIPPED for result in results),
        not_supported=sum(_word(result) == NOT_SUPPORTED for result in results),
        worst=", ".join(words) or "nothing compared",
        ms=sum(result["ms"] for result in results),
    )


def _what_ran(report: dict[str, Any]) -> dict[str, str]:
    backend = report["backend"]
    return {
        "backend": f"{backend['name']} {backend['version']} ({backend['factory']})",
        "mode": f"{backend['mode']} on {backend['device']}",
        "model dims, dtypes": f"{report['dims']}, {', '.join(report['dtypes'])}",
        "profile": report["profile"],
        "suite": f"{report['suite']['version']} at {report['commit']}",
        "date": f"{report['date']}, {report['seconds']:.0f} s",
        "time limit of a test": f"{report['time_limit']:g} s" if report["time_limit"] else "none",
        "tests": _counts(report),
        **report["environment"],
    }


def _counts(report: dict[str, Any]) -> str:
    totals, words = report["totals"], Counter(map(_word, report["results"]))
    counts = {
        **{word: words[word] for word in ("passed", FAILED, FAILED_AS_EXPECTED)},
        **{word: words[word] for word in (NOT_SUPPORTED, SKIPPED)},
        "skipped by selection": totals["deselected"],
        "without a result": totals["unanswered"],
        "ended their process": totals["died"],
        "exceeded the time limit": totals["timed-out"],
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
