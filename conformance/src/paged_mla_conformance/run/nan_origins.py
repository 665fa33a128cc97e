"""Find the memory from which a NaN or a wild address comes (S-9).

A test with such a symptom runs again, with finite numbers or zeros in one kind of memory at a time.
Only one of these runs uses the GPU at a time, because another process would clear shared memory.
"""

from __future__ import annotations

import time

from paged_mla_conformance.run.asked_again import ask_again
from paged_mla_conformance.run.options import Options
from paged_mla_conformance.run.reports.causes import telling_tests
from paged_mla_conformance.run.reports.nan_origin import NanOrigin
from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.reports.symptom import NAN, symptom_of
from paged_mla_conformance.run.workers.progress import Progress

STALE = "stale"
"""The profile in which memory that a backend must not read holds finite numbers."""
SURROUNDINGS = "PAGED_MLA_SURROUNDINGS"
"""The environment variable that chooses a kind of memory to fill with zeros."""
ZEROS_IN = {
    "zeros-in-buffers": NanOrigin.BUFFERS,
    "zeros-in-shared-memory": NanOrigin.SHARED_MEMORY,
    "zeros-in-guard-zones": NanOrigin.GUARD_ZONES,
    "zeros-in-late-inputs": NanOrigin.LATE_INPUTS,
}
"""Values of the variable, each with the origin of the NaN that the value removes."""
_OF_GPUS = ("zeros-in-shared-memory", "zeros-in-late-inputs")
_MOST = 4  # tests that run again
_SECONDS = 60.0  # after this time no other test runs again; each run loads the backend again


def find_nan_origins(options: Options, report: Report, progress: Progress) -> None:
    """Run one test of each of the largest causes that are a NaN or a wild address again.

    At most four tests run again, each one to six times. Each run has a new process. After 60
    seconds no other test begins.

    Parameters
    ----------
    options : Options
        The options of the finished run.
    report : Report
        The report of the finished run; the origins are added to ``nan_origins``.
    progress : Progress
        Shows which test runs again.
    """
    kinds = {result.test: symptom_of(result).kind for result in report.results if result.fails}
    end = time.monotonic() + _SECONDS
    for test in telling_tests(report.results)[:_MOST]:
        if time.monotonic() > end:
            return
        progress.begin(f"running {test} again to find the memory from which its error comes")
        origin = _origin(options, report, test, kinds[test])
        if origin is not None:
            report.nan_origins[test] = origin


def _origin(options: Options, report: Report, test: str, kind: str) -> NanOrigin | None:
    """Return the origin of the symptom `kind` of a test, or ``None`` if it is not known."""
    profile = f"--mla-profile={report.subject.profile},{STALE}"
    again = ask_again(options, report, test, profile)
    if again is None or again.outcome not in {"passed", "failed"}:
        return None
    if not _shows(again, kind):
        return NanOrigin.UNREAD
    if not report.subject.has_surroundings:
        return NanOrigin.NOT_UNREAD if kind == NAN else None

    is_gpu = report.subject.mode == "gpu"
    known = set(report.nan_origins.values())  # another cause often has the same origin
    for value, origin in sorted(ZEROS_IN.items(), key=lambda entry: entry[1] not in known):
        if value in _OF_GPUS and not is_gpu:
            continue
        result = ask_again(options, report, test, environment={SURROUNDINGS: value})
        if result is not None and result.end == "returned" and not _shows(result, kind):
            unchanged = ask_again(options, report, test)
            return origin if unchanged is not None and _shows(unchanged, kind) else None
    return NanOrigin.COMPUTED if kind == NAN else None


def _shows(result: Result, kind: str) -> bool:
    return result.fails and symptom_of(result).kind == kind
