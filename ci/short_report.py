"""Shorten reports of the suite to the form that the repository keeps.

A short report has the number of tests that did not run for each reason, and only the assertion of
a failure's traceback.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from paged_mla_conformance.run.reports.report import to_json
from paged_mla_conformance.run.reports.result import error_of

KEPT = ("test", "group", "outcome", "worst", "ms", "reason", "message", "note", "end")


def shortened(document: dict[str, Any]) -> dict[str, Any]:
    """Return the short form of a report; a short report is returned unchanged."""
    asked = [result for result in document["results"] if result["outcome"] != "skipped"]
    skipped = Counter(r["reason"] for r in document["results"] if r["outcome"] == "skipped")
    reasons = document.get("skipped", {}) | skipped
    results = [{name: r[name] for name in KEPT if name in r} for r in asked]
    for result in results:
        if "message" in result:
            result["message"] = error_of(result["message"])
    return {**document, "skipped": reasons, "results": results}


def main(arguments: list[str]) -> int:
    """Rewrite each report in place; return 0."""
    parser = argparse.ArgumentParser(prog="python -m ci.short_report", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="a file to rewrite")
    for path in parser.parse_args(arguments).reports:
        path.write_text(to_json(shortened(json.loads(path.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
