"""Choose the tests of a quick verdict from those that a backend supports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_mla_conformance.run.quick.table import Entry

MOST_TESTS = 80
MOST_MS = 30_000.0  # limit on the time that the reference takes for all tests, on one core
OVERHEAD_MS = 20.0  # time that pytest and the comparison take in each test
_WORTH_MS = 300.0  # among tests that take much less than this, only the number of faults counts


@dataclass(frozen=True)
class Choice:
    """The tests of a quick verdict.

    Parameters
    ----------
    keys : tuple of str
        Keys of the chosen tests.
    found : int
        How many known faults the chosen tests find.
    findable : int
        How many known faults all tests that the backend supports find.
    """

    keys: tuple[str, ...]
    found: int
    findable: int


@dataclass(frozen=True)
class Claim:
    """The data from which a quick run reports how many known faults its tests can find.

    Parameters
    ----------
    findable : int
        How many known faults all tests that the backend supports find.
    finds : dict of str to list of str
        The known faults that each chosen test finds, by the id of the test.
    """

    findable: int
    finds: dict[str, list[str]]


def choose(table: dict[str, Entry], declared: Iterable[str]) -> Choice:
    """Return a greedy choice of tests: the next test finds the most further faults for its time.

    The choice has at most :data:`MOST_TESTS` tests, which take at most :data:`MOST_MS` together.

    Parameters
    ----------
    table : dict of str to Entry
        The known faults and the time of each test, by its key.
    declared : iterable of str
        Keys of the tests that the backend supports.
    """
    left = {key: table[key] for key in declared if key in table}
    findable = frozenset[str]().union(*(entry.finds for entry in left.values()))
    found: set[str] = set()
    chosen: list[str] = []
    spent = 0.0
    while left and len(chosen) < MOST_TESTS:
        gain = {
            key: len(entry.finds - found) / (entry.ms + _WORTH_MS) for key, entry in left.items()
        }
        best = max(sorted(gain), key=gain.__getitem__)
        entry = left.pop(best)
        if not gain[best]:
            break
        if spent + _cost(entry) > MOST_MS:
            continue
        chosen.append(best)
        found |= entry.finds
        spent += _cost(entry)
    return Choice(tuple(chosen), len(found), len(findable))


def _cost(entry: Entry) -> float:
    return entry.ms + OVERHEAD_MS
