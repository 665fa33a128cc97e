"""The report as one self-contained page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paged_mla_conformance.run.reports.result import FAILING

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)


def write(report: dict[str, Any], path: Path) -> None:
    """Render the JSON report to `path`."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace")


def render(report: dict[str, Any]) -> str:
    """Return the page."""
    left_out = Counter(
        f"{result['outcome']}: {result.get('reason', '')}"
        for result in report["results"]
        if result["outcome"] in {"skipped", "expected-failure"}
    )
    page = _TEMPLATES.get_template("report.html")
    return page.render(report, ran=_what_ran(report), left_out=left_out, failing=FAILING) + "\n"


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
        "tests": ", ".join(f"{n} {what}" for what, n in report["totals"].items() if n),
        **report["environment"],
    }
