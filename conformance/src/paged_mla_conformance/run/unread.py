"""Whether a NaN was read or computed: its test is asked again over finite memory (S-9)."""

from __future__ import annotations

from paged_mla_conformance.run.asked_again import ask_again
from paged_mla_conformance.run.options import Options
from paged_mla_conformance.run.reports.causes import telling_tests
from paged_mla_conformance.run.reports.report import Report

STALE = "stale"
"""The profile in which memory that nobody may read holds finite numbers."""
_MOST = 4  # tests


def ask_over_stale_memory(options: Options, report: Report) -> None:
    """Ask a test of each cause that is a NaN again, in a process of its own.

    Parameters
    ----------
    options : Options
        Of the run.
    report : Report
        Of the run, finished. Gets what became of the tests.
    """
    profile = f"--mla-profile={report.subject.profile},{STALE}"
    for test in telling_tests(report.results)[:_MOST]:
        result = ask_again(options, report, test, profile)
        if result is not None:
            report.over_stale_memory[result.test] = result
