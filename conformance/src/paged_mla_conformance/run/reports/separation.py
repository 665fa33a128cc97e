"""Find the property of cases that separates failing tests from passing ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from paged_mla_conformance.run.reports.properties import Property, properties_of
from paged_mla_conformance.suite.selection.traits import Traits

FEWEST = 3  # different failing cases; fewer cases always have some property in common
_FEWEST_OF_PAIRS = 6  # the same limit for two properties together
_LEAST_FAILING = 0.9  # least share of the failing cases that must have the property
_MOST_PASSING = 0.3  # largest share of the passing cases that may have the property
_PRICE = 0.05  # by how much two properties together must be better than one
_NOT_OF_A_SITUATION = {"dtype", "cache_format", "operations"}


@dataclass(frozen=True)
class Separation:
    """A property that nearly all failing cases and few passing cases have.

    Parameters
    ----------
    phrase : str
        The words after "the failing cases have".
    failing, passing : int
        How many failing cases, and how many passing cases, have the property.
    """

    phrase: str
    failing: int
    passing: int


@dataclass(frozen=True)
class _Held:
    """One or two properties; bits of two numbers mark the cases that have them."""

    phrase: str
    failing: int
    passing: int

    def both(self, other: _Held) -> _Held:
        phrase = f"{self.phrase}, and {other.phrase}"
        return _Held(phrase, self.failing & other.failing, self.passing & other.passing)


def separate(failing: Sequence[Traits], passing: Sequence[Traits]) -> Separation | None:
    """Return the property that separates failing cases from passing ones, or ``None``.

    The worth of a property is the smaller of two numbers: the share of cases that both fail and
    have the property among those that do either, and the difference of its shares among failing and
    passing cases. The share of failing cases without the property is subtracted, because a harmful
    case may pass by chance, but no harmless case fails. Of properties with the same worth, the
    simplest is returned. Two properties together are returned only if they are clearly better. The
    result is ``None`` if no case passes, fewer than ``FEWEST`` different cases fail, or every
    property is missing in too many failing cases or holds for too many passing cases.

    Parameters
    ----------
    failing, passing : sequence of dict
        The traits of the failing and of the passing cases.
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
    """Return how well a property separates failing from passing cases; 1 means perfectly."""
    have, too = held.failing.bit_count(), held.passing.bit_count()
    share = have / failing
    return min(have / (failing + too), share - too / passing) - (1 - share)


def _bits(each: Property, known: Sequence[Traits]) -> int:
    return int("".join("01"[each.holds(traits)] for traits in known) or "0", 2)


def _situation(traits: Traits) -> str:
    """Return the traits without the element type, the format and the operations of the test."""
    return repr(sorted((k, v) for k, v in traits.items() if k not in _NOT_OF_A_SITUATION))
