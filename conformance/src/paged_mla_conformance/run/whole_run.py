"""One run of the suite, from the first worker process to the reports and the verdict."""

from __future__ import annotations

import sys

from paged_mla_conformance.run.explained import explain_causes
from paged_mla_conformance.run.nan_origins import find_nan_origins
from paged_mla_conformance.run.options import Options, report_files
from paged_mla_conformance.run.reports import html, junit, summary
from paged_mla_conformance.run.reports.report import Report, to_json
from paged_mla_conformance.run.status import INTERRUPTED
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.run.workers.progress import Progress
from paged_mla_conformance.run.workers.scheduler import Refused, Scheduler
from paged_mla_conformance.run.workers.worker import Worker
from paged_mla_shared.documents import printable


def run_suite(options: Options, first: Worker, commit: str) -> int:
    """Run the suite, write the reports and print the summary with the verdict.

    Parameters
    ----------
    options : Options
    first : Worker
        A worker process that has been started with these options.
    commit : str
        The commit of the suite's source.

    Returns
    -------
    int
        The exit status: 0 if there is no reason against the backend, 1 if there is one, 2 if the
        run was interrupted, and pytest's status if the run could not start.
    """
    report = Report(Subject(options.backend), time_limit=options.time_limit, commit=commit)
    progress = Progress(sys.stdout)
    scheduler = Scheduler(
        options.pytest_arguments,
        report,
        progress,
        first=first,
        workers=options.workers,
        on_screen=options.on_screen,
    )
    status = 0
    try:
        scheduler.run()
        if not options.on_screen:
            find_nan_origins(options, report, progress)
            if len(report.results) > 1:  # a run of one test prints its whole failure
                explain_causes(options, report)
    except Refused as refused:
        print(printable(refused), file=sys.stderr)
        return refused.status
    except KeyboardInterrupt:
        report.interrupted = True
        status = INTERRUPTED
    if options.report is not None:
        document = report.as_dict()
        as_json, as_html, as_xml = report_files(options.report)
        as_json.write_text(to_json(document))
        html.write(document, as_html)
        junit.write(document, as_xml)
    summary.write(report, sys.stdout, dump=options.dump)
    return status or int(bool(report.reasons_against))
