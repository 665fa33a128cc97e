"""Whether a NaN was read or computed: its test is asked again over finite memory (S-9)."""

from __future__ import annotations

import io

from paged_mla_conformance.run.options import Options
from paged_mla_conformance.run.reports.causes import telling_tests
from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.run.workers.progress import Progress
from paged_mla_conformance.run.workers.scheduler import Refused, Scheduler
from paged_mla_conformance.run.workers.worker import Worker, threads_of_each

STALE = "stale"
"""The profile in which memory that nobody may read holds finite numbers."""
_MOST = 4  # tests
_NOT_AGAIN = ("--mla-quick", "--mla-dump=")


def ask_over_stale_memory(options: Options, report: Report) -> None:
    """Ask a test of each cause that is a NaN again, in a process of its own.

    Parameters
    ----------
    options : Options
        Of the run.
    report : Report
        Of the run, finished. Gets what became of the tests.
    """
    for test in telling_tests(report.results)[:_MOST]:
        result = _asked_again(options, report, test)
        if result is not None:
            report.over_stale_memory[result.test] = result


def _asked_again(options: Options, report: Report, test: str) -> Result | None:
    """Return what becomes of a test; ``None`` if it was not asked."""
    arguments = [a for a in options.pytest_arguments if not a.startswith(_NOT_AGAIN)]
    arguments += [f"--mla-profile={report.subject.profile},{STALE}", f"--mla-only={test}"]
    again = Report(Subject(options.backend), time_limit=options.time_limit, commit=report.commit)
    scheduler = Scheduler(
        arguments,
        again,
        Progress(io.StringIO()),
        first=Worker(arguments, on_screen=False, threads=threads_of_each(1)),
        workers=1,
        on_screen=False,
    )
    try:
        scheduler.run()
    except Refused:
        return None
    return next(iter(again.results), None)
