"""The tests of a quick verdict, chosen from those that a backend declares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_mla_conformance.run.quick.table import Entry

MOST_TESTS = 80
MOST_MS = 30_000.0  # of the reference, on one core
OVERHEAD_MS = 20.0  # that pytest and the comparison take in each test
_WORTH_MS = 300.0  # of tests far below this, the one that finds most comes first


@dataclass(frozen=True)
class Choice:
    """What a quick verdict asks.

    Parameters
    ----------
    keys : tuple of str
        Keys of its tests.
    found : int
        How many known faults these tests find.
    findable : int
        How many known faults the tests that the backend declares would find.
    """

    keys: tuple[str, ...]
    found: int
    findable: int


@dataclass(frozen=True)
class Claim:
    """What a quick run may say of itself, once its tests were asked.

    Parameters
    ----------
    findable : int
        As of a :class:`Choice`.
    finds : dict of str to list of str
        Of each chosen test, by its id, the known faults that it finds.
    """

    findable: int
    finds: dict[str, list[str]]


def choose(table: dict[str, Entry], declared: Iterable[str]) -> Choice:
    """Choose tests: always the one that finds most further faults for its time.

    Parameters
    ----------
    table : dict of str to Entry
    declared : iterable of str
        Keys of the tests that the backend would be asked.
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
