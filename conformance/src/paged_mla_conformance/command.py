"""``paged-mla conformance``: run the suite against a backend and print the verdict."""

from __future__ import annotations

import sys

import pytest

from paged_mla_conformance import html, junit, summary
from paged_mla_conformance.conduct import Conductor, Refused
from paged_mla_conformance.options import parse, report_files
from paged_mla_conformance.progress import Progress
from paged_mla_conformance.report import Report, to_json
from paged_mla_conformance.subject import Subject
from paged_mla_conformance.worker import ignored_variables
from paged_mla_shared.provenance import commit_of


def main(arguments: list[str] | None = None) -> int:
    """Ask the suite; return 0 when the backend conforms, or passed what was asked of it."""
    commit = commit_of(__file__)  # before an older report is removed, which commits may have
    options = parse(arguments)
    for name in ignored_variables():
        print(f"{name} is set and not used")
    report = Report(Subject(options.backend), time_limit=options.time_limit, commit=commit)
    conductor = Conductor(
        options.pytest_arguments,
        report,
        Progress(sys.stdout),
        workers=options.workers,
        on_screen=options.on_screen,
    )
    status = 0
    try:
        conductor.run()
    except Refused as refused:
        print(refused, file=sys.stderr)
        return refused.status
    except KeyboardInterrupt:
        report.errors.append("interrupted")
        status = int(pytest.ExitCode.INTERRUPTED)
    if options.report is not None:
        document = report.as_dict()
        as_json, as_html, as_xml = report_files(options.report)
        as_json.write_text(to_json(document))
        html.write(document, as_html)
        junit.write(document, as_xml)
    summary.write(report, sys.stdout)
    return status or int(bool(report.reasons_against))
