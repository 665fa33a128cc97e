"""Render a report as JUnit XML, for CI systems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from paged_mla_conformance.run.reports.result import FAILING, shown_outcome

_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(report: dict[str, Any], path: Path) -> None:
    """Render the JSON report to `path`."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace")


def render(report: dict[str, Any]) -> str:
    """Return the XML document of a JSON report.

    It has a test case for each result, and a test case "verdict" if there are reasons against the
    backend. Tests that are not supported, and tests whose failure is expected, count as skipped;
    their message starts with "not supported" or "failed (expected)".
    """
    totals = report["totals"]
    unfinished = bool(report["reasons_against"])
    suite = ET.Element(
        "testsuite",
        name=report["suite"]["name"],
        timestamp=report["date"],
        time=str(report["seconds"]),
        tests=str(totals["all"] + unfinished),
        failures=str(totals["failed"] + totals["unexpected-pass"] + unfinished),
        skipped=str(totals["skipped"] + totals["expected-failure"]),
    )
    for result in report["results"]:
        case = _case(suite, result["group"], result["test"], result["ms"] / 1e3)
        reason = result.get("reason", "")
        word = shown_outcome(result["outcome"], reason)
        if result["outcome"] in FAILING:
            _say(case, "failure", word, f"{result.get('message', '')}\n{result['replay']}")
        elif result["outcome"] != "passed":
            _say(case, "skipped", f"{word}: {reason}", "")
    if unfinished:
        case = _case(suite, "run", "verdict", 0.0)
        _say(case, "failure", report["verdict"], "\n".join(report["reasons_against"]))
    return f"<?xml version='1.0' encoding='utf-8'?>\n{ET.tostring(suite, encoding='unicode')}\n"


def _case(suite: ET.Element, group: str, name: str, seconds: float) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=group, name=name, time=f"{seconds:.3f}")


def _say(case: ET.Element, tag: str, message: str, text: str) -> None:
    """Add an element to a test case; "?" replaces characters that XML does not allow."""
    said = ET.SubElement(case, tag, message=_NO_XML.sub("?", message))
    said.text = _NO_XML.sub("?", text)
