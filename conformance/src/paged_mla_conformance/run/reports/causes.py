"""The causes of failures: groups of tests with the same symptom, and what they have in common."""

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
"""The file to which the replay command of a cause writes its dump."""

_MOST_NAMED = 3  # groups
_COMPUTED_RULES = {"out": "S-5", "lse": "S-7"}
_OF_EVERY_ANSWER = {"S-5", "S-7", "S-9"}  # every test that compares an output checks these rules


@dataclass(frozen=True)
class Cause:
    """Tests that fail with the same symptom.

    Parameters
    ----------
    symptom : Symptom
    tests : tuple of str
        The ids of the tests, sorted.
    common : str
        A phrase about the property that separates these tests from those that passed.
    smallest : Result
        The failing test with the least work.
    origin : str
        A phrase about the origin of a NaN or of a wild address; "" for other symptoms and if the
        origin is not known.
    fault : str
        A sentence about the known fault that gives the output of the smallest test; "" if none.
    """

    symptom: Symptom
    tests: tuple[str, ...]
    common: str
    smallest: Result
    origin: str = ""
    fault: str = ""

    @property
    def sentence(self) -> str:
        """A sentence with the symptom, the number of tests, and what they have in common."""
        count = len(self.tests)
        parts = [f"{self.symptom} in {count} test{'' if count == 1 else 's'}"]
        return "; ".join(part for part in (*parts, self.common, self.origin) if part) + "."

    @property
    def error(self) -> str:
        """The first error of the smallest test."""
        return detail_of(self.smallest)

    @property
    def replay(self) -> str:
        """The command that runs only the smallest test, and writes a dump if there is a step."""
        dump = f" --dump {DUMP}" if self.has_dump else ""
        return f"{self.smallest.replay}{dump}"

    @property
    def has_dump(self) -> bool:
        """Whether an output is wrong, so that a dump contains a step to explain."""
        is_an_answer = bool(self.symptom.rule) and self.symptom.kind != WILD_ADDRESS
        return is_an_answer and self.smallest.outcome == "failed"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the cause in the JSON report."""
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
    """Return the causes of the failures in `results`; the cause of the most tests is first.

    Parameters
    ----------
    results : sequence of Result
        All results of a run.
    nan_origins : mapping of str to NanOrigin, optional
        The origins of NaN and of wild addresses, by the id of the test.
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
    """Return the id of a test for each cause that is a NaN or a wild address; largest cause first.

    If the test runs again with other numbers in the memory that a backend must not read, its result
    shows the origin of the symptom.
    """
    nan = [f for symptom, f in _alike(results).items() if symptom.kind in {NAN, WILD_ADDRESS}]
    found = [_telling(failed) for failed in sorted(nan, key=len, reverse=True)]
    return [result.test for result in found if result is not None]


def _telling(failed: Sequence[Result]) -> Result | None:
    """Return the smallest test that has no NaN in memory if unread memory contains finite numbers.

    Gaps between the elements of strided inputs stay NaN in every profile, as do partial results
    without a key that are merged; tests with them are not returned.
    """
    told = [
        result
        for result in failed
        if not result.traits.get("strided_inputs") and result.traits.get("operations") != ["merge"]
    ]
    return _smallest(told) if told else None


def _alike(results: Sequence[Result]) -> dict[Symptom, list[Result]]:
    """Return the tests that failed, grouped by their symptom."""
    alike: defaultdict[Symptom, list[Result]] = defaultdict(list)
    for result in results:
        if result.fails:
            alike[symptom_of(result)].append(result)
    return alike


def _smallest(failed: Sequence[Result]) -> Result:
    return min(failed, key=lambda result: (result.traits.get("work", math.inf), result.test))


def _attributed(symptom: Symptom, origin: NanOrigin | None) -> tuple[Symptom, str]:
    """Return a symptom with the rule that its origin breaks, and the phrase of the origin.

    Without an origin, the symptom is unchanged and the phrase is "".
    """
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

    They call the operations that all failing tests call. They also compared the same quantity, if
    any passing test did: exact comparisons that pass have other names. For a rule that only some
    tests check, only passing tests of this rule are returned, if there are any.
    """
    shared = set.intersection(*(set(r.traits.get("operations", ())) for r in failed))
    asked = [r for r in passed if shared <= set(r.traits.get("operations", ()))]
    what = symptom.what
    same = [r for r in asked if any(check["what"].startswith(what) for check in r.checks)]
    found = same if same or what in _COMPUTED_RULES else asked
    by_rule = [r for r in found if symptom.rule in r.rules]
    return found if symptom.rule in _OF_EVERY_ANSWER or not by_rule else by_rule


def _common(failed: Sequence[Result], passed: Sequence[Result]) -> str:
    """Return a phrase about what separates failing cases from passing ones; "" if unknown."""
    failing = [result.traits for result in failed if "work" in result.traits]
    passing = [result.traits for result in passed if "work" in result.traits]
    if not failing:
        groups = sorted({result.group for result in failed})
        return f"all of these tests are in {_listed(groups)}" if len(failed) > 1 else ""
    every = "every comparable case fails"
    if all(traits["longest"] for traits in failing):
        passing = [traits for traits in passing if traits["longest"]]
        every = "every case in which a query sees a key fails"
    if not passing:
        return every if len(failing) > 1 else ""
    ones = "the only passing case" if len(passing) == 1 else f"the {len(passing)} passing cases"
    found = separate(failing, passing)
    if found is None:
        if len(failing) < FEWEST:
            many = f"{len(passing)} comparable cases passed"
            return "1 comparable case passed" if len(passing) == 1 else many
        return f"no property of a case that the suite knows separates them from {ones}"
    count = len(failing)
    subject = f"{found.failing} of {count} failing cases have"
    if found.failing == count:
        all_have = f"all {count} failing cases have"
        subject = "every failing case has" if count == len(failed) else all_have
    none = "none" if not found.passing else str(found.passing)
    others = f"and {none} of {ones} {'do' if found.passing > 1 else 'does'}"
    if len(passing) == 1:
        others = "and the only passing case does not"
    return f"{subject} {found.phrase}, {others}"


def _listed(groups: Sequence[str]) -> str:
    if len(groups) > _MOST_NAMED:
        return f"{len(groups)} groups"
    return f"the group {groups[0]}" if len(groups) == 1 else f"the groups {', '.join(groups)}"
