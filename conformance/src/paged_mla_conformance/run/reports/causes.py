"""The causes of a run's failures: tests that fail alike, and what they have in common."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paged_mla_conformance.run.reports.nan_origin import NanOrigin
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.reports.separation import FEWEST, separate
from paged_mla_conformance.run.reports.symptom import (
    NAN,
    WILD_ADDRESS,
    Symptom,
    detail_of,
    symptom_of,
)

DUMP = "failed.safetensors"
"""Where the replay of a cause writes its dump."""

_MOST_NAMED = 3  # groups
_COMPUTED_RULES = {"out": "S-5", "lse": "S-7"}
_OF_EVERY_ANSWER = {"S-5", "S-7", "S-9"}  # whatever rules a test is there for


@dataclass(frozen=True)
class Cause:
    """Tests that fail alike.

    Parameters
    ----------
    symptom : Symptom
    tests : tuple of str
        Their names, sorted.
    common : str
        What tells them from the tests that passed, in words.
    smallest : Result
        The one of least work.
    origin : str
        Where a NaN comes from; "" for other symptoms, and where that is not known.
    fault : str
        What the smallest one's answers are those of, in a sentence; empty where nothing fits.
    """

    symptom: Symptom
    tests: tuple[str, ...]
    common: str
    smallest: Result
    origin: str = ""
    fault: str = ""

    @property
    def sentence(self) -> str:
        """Say what is wrong, where, and where not."""
        count = len(self.tests)
        parts = [f"{self.symptom} in {count} test{'' if count == 1 else 's'}"]
        return "; ".join(part for part in (*parts, self.common, self.origin) if part) + "."

    @property
    def error(self) -> str:
        """The first error of the smallest test."""
        return detail_of(self.smallest)

    @property
    def replay(self) -> str:
        """The command that asks the smallest test alone, and writes a dump where there is one."""
        dump = f" --dump {DUMP}" if self.has_dump else ""
        return f"{self.smallest.replay}{dump}"

    @property
    def has_dump(self) -> bool:
        """Whether an answer is wrong, so that there is a step to explain."""
        is_an_answer = bool(self.symptom.rule) and self.symptom.kind != WILD_ADDRESS
        return is_an_answer and self.smallest.outcome == "failed"

    def as_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        return {
            **vars(self.symptom),
            "count": len(self.tests),
            "sentence": self.sentence,
            "smallest": self.smallest.test,
            "error": self.error,
            "replay": self.replay,
            "fault": self.fault,
            "tests": list(self.tests),
        }


def causes_of(
    results: Sequence[Result], nan_origins: Mapping[str, NanOrigin] | None = None
) -> list[Cause]:
    """Pool the failures of a run, the cause of most tests first.

    Parameters
    ----------
    results : sequence of Result
    nan_origins : mapping of str to NanOrigin, optional
        Where the NaN of some tests comes from, by the name of the test.
    """
    origins = nan_origins or {}
    passed = [result for result in results if result.outcome == "passed"]
    known: defaultdict[tuple[Symptom, str], list[Result]] = defaultdict(list)
    for symptom, failed in _alike(results).items():
        telling = _telling(failed)
        known[_attributed(symptom, origins.get(telling.test) if telling else None)] += failed
    found = [_cause(*named, failed, passed) for named, failed in known.items()]
    return sorted(found, key=lambda cause: (-len(cause.tests), cause.tests))


def telling_tests(results: Sequence[Result]) -> list[str]:
    """Return a test of each cause that is a NaN which may be read or computed, largest first.

    Asked again with finite numbers in memory that nobody may read, it tells which.
    """
    nan = [f for symptom, f in _alike(results).items() if symptom.kind in {NAN, WILD_ADDRESS}]
    found = [_telling(failed) for failed in sorted(nan, key=len, reverse=True)]
    return [result.test for result in found if result is not None]


def _telling(failed: Sequence[Result]) -> Result | None:
    """Return the smallest test that has no NaN left when unread memory holds finite numbers.

    What lies between the elements of strided inputs, and in parts without a key that are merged,
    stays NaN then.
    """
    told = [
        result
        for result in failed
        if not result.traits.get("strided_inputs") and result.traits.get("operations") != ["merge"]
    ]
    return _smallest(told) if told else None


def _alike(results: Sequence[Result]) -> dict[Symptom, list[Result]]:
    """Return the tests that failed, by what is wrong in them."""
    alike: defaultdict[Symptom, list[Result]] = defaultdict(list)
    for result in results:
        if result.fails:
            alike[symptom_of(result)].append(result)
    return alike


def _smallest(failed: Sequence[Result]) -> Result:
    return min(failed, key=lambda result: (result.traits.get("work", math.inf), result.test))


def _attributed(symptom: Symptom, origin: NanOrigin | None) -> tuple[Symptom, str]:
    """Return a symptom with the rule that the origin of its NaN breaks, and a phrase for it."""
    if origin is None:
        return symptom, ""
    if origin.is_read:
        return replace(symptom, rule="S-9"), origin.phrase
    rule = _COMPUTED_RULES.get(symptom.what, "") if symptom.rule == "S-9" else symptom.rule
    return replace(symptom, rule=rule), origin.phrase


def _cause(
    symptom: Symptom, origin: str, failed: Sequence[Result], passed: Sequence[Result]
) -> Cause:
    names = tuple(sorted(result.test for result in failed))
    common = _common(failed, _comparable(symptom, failed, passed))
    return Cause(symptom, names, common, _smallest(failed), origin)


def _comparable(
    symptom: Symptom, failed: Sequence[Result], passed: Sequence[Result]
) -> list[Result]:
    """Return the passing tests that could have shown a symptom.

    They asked for the operations that all failing ones asked for, and compared the same thing,
    where that is known: what is compared exactly has other names where it is right. Of a rule that
    few tests ask, they asked it.
    """
    shared = set.intersection(*(set(r.traits.get("operations", ())) for r in failed))
    asked = [r for r in passed if shared <= set(r.traits.get("operations", ()))]
    what = symptom.what
    same = [r for r in asked if any(check["what"].startswith(what) for check in r.checks)]
    found = same if same or what in _COMPUTED_RULES else asked
    by_rule = [r for r in found if symptom.rule in r.rules]
    return found if symptom.rule in _OF_EVERY_ANSWER or not by_rule else by_rule


def _common(failed: Sequence[Result], passed: Sequence[Result]) -> str:
    """Say what tells failing cases from passing ones."""
    failing = [result.traits for result in failed if "work" in result.traits]
    passing = [result.traits for result in passed if "work" in result.traits]
    if not failing:
        groups = sorted({result.group for result in failed})
        return f"all of them are in {_listed(groups)}" if len(failed) > 1 else ""
    every = "every case that compares the same fails"
    if all(traits["longest"] for traits in failing):
        passing = [traits for traits in passing if traits["longest"]]
        every = "every case in which a query sees a key fails"
    if not passing:
        return every if len(failing) > 1 else ""
    ones = "the one that passed" if len(passing) == 1 else f"the {len(passing)} that passed"
    found = separate(failing, passing)
    if found is None:
        if len(failing) < FEWEST:
            many = f"{len(passing)} cases that compare the same passed"
            return "1 case that compares the same passed" if len(passing) == 1 else many
        return f"no property that the suite knows of a case tells them from {ones}"
    count = len(failing)
    subject = f"{found.failing} of {count} failing cases have"
    if found.failing == count:
        all_have = f"all {count} failing cases have"
        subject = "every failing case has" if count == len(failed) else all_have
    none = "none" if not found.passing else str(found.passing)
    others = f"and {none} of {ones}"
    if len(passing) == 1:
        others = "and the one that passed has not"
    return f"{subject} {found.phrase}, {others}"


def _listed(groups: Sequence[str]) -> str:
    if len(groups) > _MOST_NAMED:
        return f"{len(groups)} groups"
    return f"the group {groups[0]}" if len(groups) == 1 else f"the groups {', '.join(groups)}"
