"""The report of a run, with its verdict. HTML and JUnit XML are rendered from the JSON document."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paged_mla_conformance.run.reports.causes import Cause, causes_of
from paged_mla_conformance.run.reports.nan_origin import NanOrigin
from paged_mla_conformance.run.reports.result import (
    FAILED,
    FAILED_AS_EXPECTED,
    NOT_SUPPORTED,
    OUTCOMES,
    SKIPPED,
    Result,
    shown_outcome,
)
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS
from paged_mla_reference.rules import SPECIFICATION_VERSION
from paged_mla_shared import __version__
from paged_mla_shared.provenance import commit_of

CORE_MISSING = "core capability missing: "
"""The beginning of a reason about a required capability that the backend does not declare."""
SCHEMA = Path(__file__).with_name("report.schema.json")


@dataclass
class Warned:
    """A warning of the backend: its count, and the test in which it first appeared."""

    count: int
    first: str


@dataclass
class Report:
    """The results of a run, and the content of its reports.

    Parameters
    ----------
    subject : Subject
        The backend and the settings of the run.
    time_limit : float
        Seconds for one test; 0 means no limit.
    tests : list of str
        The ids of the tests that were selected.
    deselected : list of str
        The ids of the tests that the user's selection excludes.
    results : list of Result
        The results of the selected tests, in the order in which they arrived.
    stopped : str
        Why the user's options ended the run early; "" if they did not.
    errors : list of str
        Errors that kept the run from finishing.
    interrupted : bool
        Whether the user or a signal ended the run.
    findable : int
        In a quick run, how many known faults all tests that the backend supports find; else 0.
    finds : dict of str to list of str
        In a quick run, the known faults that each of its tests finds, by the id of the test.
    warnings : dict of str to Warned
        The warnings of the backend, by their text.
    nan_origins : dict of str to NanOrigin
        The origins of NaN and of wild addresses, by the id of the test.
    explanations : dict of str to str
        A sentence about the known fault that gives the same output as a failing test, by its id.
    shared_fault : str
        A sentence about the fault that explains all explained causes; "" if there is none.
    commit : str
        The commit of the suite's source.
    date : str
        When the run started, in ISO 8601 and UTC.
    started : float
        When the run started, in monotonic seconds.
    """

    subject: Subject
    time_limit: float = 0.0
    tests: list[str] = field(default_factory=list)
    deselected: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    stopped: str = ""
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False
    findable: int = 0
    finds: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, Warned] = field(default_factory=dict)
    nan_origins: dict[str, NanOrigin] = field(default_factory=dict)
    explanations: dict[str, str] = field(default_factory=dict)
    shared_fault: str = ""
    commit: str = field(default_factory=lambda: commit_of(__file__))
    date: str = field(default_factory=lambda: dt.datetime.now(dt.UTC).isoformat(timespec="seconds"))
    started: float = field(default_factory=time.monotonic)

    def warn(self, counts: dict[str, int], first: str) -> None:
        """Add counts of warnings.

        Parameters
        ----------
        counts : dict of str to int
            How often each warning appeared, by its text.
        first : str
            The test in which they appeared, for warnings that are new.
        """
        for text, count in counts.items():
            self.warnings.setdefault(text, Warned(0, first)).count += count

    @property
    def partial(self) -> bool:
        """Whether the user's options excluded tests, so that the verdict covers only the others."""
        return bool(self.deselected or self.stopped)

    @property
    def totals(self) -> dict[str, int]:
        """How many tests have a result and how many ran, and the count of each outcome."""
        found = Counter(result.outcome for result in self.results)
        ends = Counter(result.end for result in self.results)
        counts = {outcome: found[outcome] for outcome in OUTCOMES}
        return {
            "all": len(self.results),
            "run": len(self.results) - counts["skipped"],
            **counts,
            "died": ends["died"],
            "timed-out": ends["timed-out"],
            "deselected": len(self.deselected),
            "unanswered": len(self.tests) - len(self.results),
        }

    @property
    def skip_reasons(self) -> dict[str, int]:
        """How many tests did not run for each reason: not supported ones and skipped ones."""
        return dict(Counter(r.reason for r in self.results if r.outcome == "skipped"))

    @property
    def causes(self) -> list[Cause]:
        """The causes of the failures; the cause of the most failing tests is first."""
        found = causes_of(self.results, self.nan_origins)
        known = self.explanations
        return [replace(cause, fault=known.get(cause.smallest.test, "")) for cause in found]

    @property
    def reasons_against(self) -> list[str]:
        """Why the backend is not conformant; empty if there is no reason against it."""
        against = ["interrupted"] if self.interrupted else []
        against += self.errors
        totals = self.totals
        failing = totals["failed"] + totals["unexpected-pass"]
        if failing:
            against.append(f"{failing} failing test{_plural(failing)}")
        if unanswered := totals["unanswered"]:
            tests = "test has" if unanswered == 1 else "tests have"
            against.append(f"{unanswered} {tests} no result")
        undeclared = {r.reason for r in self.results if r.undeclared_core}
        against += [f"{CORE_MISSING}{reason}" for reason in sorted(undeclared)]
        if self.tests and not (self.partial or unanswered):
            asked = {r.group for r in self.results}
            missing = [group for group in SUITE_GROUPS if group not in asked]
            against += [f"the run has no test of the group {group}" for group in missing]
        if not totals["run"]:
            against.append("no test ran")
        return against

    @property
    def verdict(self) -> str:
        """One line: whether the backend conforms, what was tested, and the counts of results."""
        return f"{self._word}: {self.subject.title}: {self._evidence}"

    @property
    def _word(self) -> str:
        against = bool(self.reasons_against)
        if self.interrupted and not any(result.fails for result in self.results):
            return "INTERRUPTED"
        if self.partial:
            return "FAILED in part" if against else "PASSED in part"
        if against:
            return "NOT CONFORMANT"
        totals = self.totals
        left_out = totals["skipped"] or totals["expected-failure"] or self.subject.dtypes_left_out
        return "CONFORMANT with exclusions" if left_out else "CONFORMANT"

    @property
    def _evidence(self) -> str:
        totals = self.totals
        words = Counter(shown_outcome(result.outcome, result.reason) for result in self.results)
        counts = {
            **{word: words[word] for word in (FAILED, FAILED_AS_EXPECTED, NOT_SUPPORTED, SKIPPED)},
            "skipped by selection": 0 if self.findable else totals["deselected"],
            "without a result": totals["unanswered"],
        }
        parts = [f"{totals['passed']} passed"]
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        if self.subject.dtypes_left_out:
            parts.append(f"{'/'.join(self.subject.dtypes_left_out)} skipped (--dtypes)")
        evidence = ", ".join(parts)
        if self.findable and not (totals["unanswered"] or self.stopped):
            evidence += f"; {self.quick}"
        return evidence

    @property
    def found(self) -> int:
        """How many known faults the tests of a quick run find; only tests that ran count."""
        asked = {result.test for result in self.results if result.outcome != "skipped"}
        faults = [self.finds[test] for test in self.finds.keys() & asked]
        return len(frozenset[str]().union(*faults))

    @property
    def quick(self) -> str:
        """A phrase with the share of the known faults that the tests of a quick run find."""
        faults = f"{self.found} of {self.findable} known faults that apply to this backend"
        return f"quick: these tests find {faults}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document, which follows ``report.schema.json``."""
        subject = asdict(self.subject)
        names = ("factory", "name", "version", "mode", "device", "capabilities")
        return {
            "schema": 2,
            "suite": {
                "name": "paged-mla-conformance",
                "version": __version__,
                "specification": SPECIFICATION_VERSION,
            },
            "commit": self.commit,
            "date": self.date,
            "seconds": round(time.monotonic() - self.started, 3),
            "time_limit": self.time_limit,
            "backend": {name: subject[name] for name in names},
            "environment": subject["environment"],
            "dims": subject["dims"],
            "dtypes": subject["dtypes"],
            "profile": subject["profile"],
            "conformant": not self.partial and not self.reasons_against,
            "partial": self.partial,
            "reasons_against": self.reasons_against,
            "verdict": self.verdict,
            "totals": self.totals,
            **(
                {"quick": {"found": self.found, "findable": self.findable}} if self.findable else {}
            ),
            "deselected": sorted(self.deselected),
            "warnings": [
                {"message": text, **asdict(warned)} for text, warned in self.warnings.items()
            ],
            "causes": [cause.as_dict() for cause in self.causes],
            **({"shared_fault": self.shared_fault} if self.shared_fault else {}),
            "results": [r.as_dict() for r in sorted(self.results, key=lambda r: r.test)],
        }


def to_json(document: dict[str, Any]) -> str:
    """Return a JSON document as text, with one line for each test, so that two can be compared."""
    head = json.dumps({k: v for k, v in document.items() if k != "results"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(result)}" for result in document["results"])
    return head.removesuffix("\n}") + f',\n "results": [\n{lines}\n ]\n}}\n'


def _plural(count: int) -> str:
    return "" if count == 1 else "s"
