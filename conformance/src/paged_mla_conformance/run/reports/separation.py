"""Which property of a situation tells failing tests from passing ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from paged_mla_conformance.run.reports.properties import Property, properties_of
from paged_mla_conformance.suite.selection.traits import Traits

FEWEST = 3  # different situations that fail: of fewer, something separates any from the rest
_FEWEST_OF_PAIRS = 6  # likewise for two properties together
_LEAST_FAILING = 0.9  # share of the failing situations that have the property
_MOST_PASSING = 0.3  # share of the passing ones that may have it
_PRICE = 0.05  # what a second property must be better by
_NOT_OF_A_SITUATION = {"dtype", "cache_format", "operations"}


@dataclass(frozen=True)
class Separation:
    """A property that nearly all failing situations have, and few of the passing ones.

    Parameters
    ----------
    phrase : str
        What stands behind "have".
    failing, passing : int
        How many have it.
    """

    phrase: str
    failing: int
    passing: int


@dataclass(frozen=True)
class _Held:
    """A property, or two, and the situations that have it as bits of two numbers."""

    phrase: str
    failing: int
    passing: int

    def both(self, other: _Held) -> _Held:
        phrase = f"{self.phrase}, and {other.phrase}"
        return _Held(phrase, self.failing & other.failing, self.passing & other.passing)


def separate(failing: Sequence[Traits], passing: Sequence[Traits]) -> Separation | None:
    """Return what separates failing situations from passing ones, ``None`` if nothing does.

    A property is worth the smaller of two numbers: how many of the situations that fail or have it
    do both, and how much larger its share is among failing situations than among passing ones. It
    is worth less by the share of failing situations without it: a case that has what is harmful may
    pass by luck, but none fails without it. Of properties of the same worth the simplest is taken,
    and two together only if they are clearly better than one.
    """
    different = len({_situation(traits) for traits in failing})
    if not passing or different < FEWEST:
        return None
    enough = _LEAST_FAILING * len(failing)
    single = []
    for each in properties_of([*failing, *passing]):
        have = _bits(each, failing)
        if have.bit_count() >= enough:
            single.append(_Held(each.phrase, have, _bits(each, passing)))
    enough_for_pairs = min(different, len(passing)) >= _FEWEST_OF_PAIRS
    together = combinations(single, 2) if enough_for_pairs else ()
    pairs = (one.both(other) for one, other in together)
    double = [held for held in pairs if held.failing.bit_count() >= enough]
    best: _Held | None = None
    most = 0.0
    for held, price in [*((held, 0.0) for held in single), *((held, _PRICE) for held in double)]:
        worth = _worth(held, len(failing), len(passing)) - price
        if worth > most + 1e-9:
            best, most = held, worth
    if best is None or best.passing.bit_count() > _MOST_PASSING * len(passing):
        return None
    return Separation(best.phrase, best.failing.bit_count(), best.passing.bit_count())


def _worth(held: _Held, failing: int, passing: int) -> float:
    """Return how well a property separates: 1 if perfectly."""
    have, too = held.failing.bit_count(), held.passing.bit_count()
    share = have / failing
    return min(have / (failing + too), share - too / passing) - (1 - share)


def _bits(each: Property, known: Sequence[Traits]) -> int:
    return int("".join("01"[each.holds(traits)] for traits in known) or "0", 2)


def _situation(traits: Traits) -> str:
    """Return what two tests of one case in two element types agree in."""
    return repr(sorted((k, v) for k, v in traits.items() if k not in _NOT_OF_A_SITUATION))
