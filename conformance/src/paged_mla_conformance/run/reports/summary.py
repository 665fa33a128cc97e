"""What the screen says at the end: failures with their replay, what was left out, the verdict.

Reports have every failure with its traceback.
"""

from __future__ import annotations

from typing import TextIO

from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import error_of
from paged_mla_shared.documents import printable


def write(report: Report, stream: TextIO) -> None:
    """Print the summary; its last line is the verdict."""
    lines: list[str] = []
    failures = sorted((r for r in report.results if r.fails), key=lambda result: result.test)
    for result in failures:
        # One failure is shown whole, as a replay does; of many, each is one line of what is wrong.
        told = result.message.splitlines() if len(failures) == 1 else [error_of(result.message)]
        lines += [f"{result.outcome}: {result.test}", *told]
        lines += [f"note: {result.note}"] if result.note else []
        lines += [f"replay: {result.replay}", ""]
    for result in report.results:
        if result.outcome == "expected-failure":
            lines.append(f"known failure: {result.test}: {result.reason}")
    lines += [f"not asked, {count}: {why}" for why, count in report.skip_reasons.items()]
    if report.warnings:
        total = sum(warned.count for warned in report.warnings.values())
        text, warned = next(iter(report.warnings.items()))
        lines.append(f"{total} warnings of the backend, first: {text}, in {warned.first}")
    if report.stopped:
        lines.append(report.stopped)
    lines += [f"against: {reason}" for reason in report.reasons_against]
    stream.write(printable("\n".join([*lines, report.verdict])) + "\n")
    stream.flush()
