"""Run one test of a finished run again, in a new process."""

from __future__ import annotations

import io
from collections.abc import Mapping

from paged_mla_conformance.run.options import Options
from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.run.workers.progress import Progress
from paged_mla_conformance.run.workers.scheduler import Refused, Scheduler
from paged_mla_conformance.run.workers.worker import Worker, threads_of_each

_NOT_AGAIN = ("--mla-quick", "--mla-dump=")


def ask_again(
    options: Options,
    report: Report,
    test: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> Result | None:
    """Run a test again and return its result, or ``None`` if the test did not run.

    Parameters
    ----------
    options : Options
        The options of the finished run.
    report : Report
        The report of the finished run; it is not changed.
    test : str
        The id of the test.
    arguments : str
        Arguments for pytest in addition to those of the finished run.
    environment : mapping of str to str, optional
        Variables of the new process, in addition to those of this process.
    """
    own = [a for a in options.pytest_arguments if not a.startswith(_NOT_AGAIN)]
    own += [*arguments, f"--mla-only={test}"]
    again = Report(Subject(options.backend), time_limit=options.time_limit, commit=report.commit)
    scheduler = Scheduler(
        own,
        again,
        Progress(io.StringIO()),
        first=Worker(own, on_screen=False, threads=threads_of_each(1), environment=environment),
        workers=1,
        on_screen=False,
    )
    try:
        scheduler.run()
    except Refused:
        return None
    return next(iter(again.results), None)
