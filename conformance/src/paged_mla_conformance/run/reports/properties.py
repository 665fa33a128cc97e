"""Properties of cases that may separate failing tests from passing ones, with their phrases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paged_mla_conformance.suite.selection.traits import Traits

_FLAGS = {
    "padded_tokens": "padded tokens",
    "queries_without_keys": "queries that see no key",
    "rows_without_keys": "rows without keys",
    "rows_without_queries": "rows without queries",
    "tokens_of_no_row": "padded tokens, or tokens of rows without keys",
    "partial_blocks": "a row whose last block is not full",
    "mixed": "rows of different query lengths",
    "strided_inputs": "inputs that are strided views",
    "strided_cache": "gaps in the cache",
    "large_offsets": "blocks at the top of a huge cache",
    "explicit_slots": "explicit slots in the step",
    "rope": "a rotation inside the step",
    "shared_prefixes": "rows that share a prefix",
    "own_softmax_scale": "a softmax scale other than the model's",
    "equal_keys": "rows whose keys are all equal",
    "odd_values": "latents that hold -0.0, NaN and infinities",
    "scaled_latents": "latents or keys of another magnitude",
    "own_cache_scale": "a cache scale other than 1",
    "spare": "capacities larger than the step needs",
}
_WORDS = {
    "operations": "a call of {}",
    "mask": "the mask {}",
    "mask_spelling": "tree masks in the form {}",
    "dtype": "the dtype {}",
    "cache_format": "the cache format {}",
    "table_tail": "{} after the blocks in a row's table",
}
_EQUAL = {
    "heads": ("1 head", "{} heads"),
    "block_size": ("blocks of 1 token", "blocks of {} tokens"),
}
_MORE = {  # phrases for a number that is larger than a limit
    "steps": "more than {} step{} on one runner",
    "queries": "a row of more than {} query token{}",
    "heads": "more than {} head{}",
    "longest": "a row of more than {} key{}",
    "rows": "more than {} row{}",
    "tokens": "more than {} query token{} in a step",
    "block_size": "blocks of more than {} token{}",
    "query_scale": "queries scaled by more than {}",
    "shortest": "more than {} key{} in each row",
    "fewest": "more than {} key{} for each query",
}
_LESS = {  # phrases for a number that is at most a limit
    "steps": "at most {} step{} on one runner",
    "queries": "at most {} query token{} in each row",
    "heads": "at most {} head{}",
    "longest": "at most {} key{} in each row",
    "rows": "at most {} row{}",
    "tokens": "at most {} query token{} in a step",
    "block_size": "blocks of at most {} token{}",
    "query_scale": "queries scaled by at most {}",
    "shortest": "a row of at most {} key{}",
    "fewest": "a query that sees at most {} key{}",
}
_DIVISORS = (128, 64, 32, 16, 8, 4, 2)
_TILES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Property:
    """A property that a case has or does not have.

    Parameters
    ----------
    phrase : str
        The words after "the failing cases have".
    holds : callable
        Takes the traits of a case and returns whether the case has the property.
    """

    phrase: str
    holds: Callable[[Traits], bool]


def properties_of(known: Sequence[Traits]) -> list[Property]:
    """Return every property by which these cases may differ; the simplest is first."""
    found = [Property(phrase, _has(name)) for name, phrase in _FLAGS.items()]
    for name, phrase in _WORDS.items():
        found += [Property(phrase.format(word), _names(name, word)) for word in _words(name, known)]
    dtypes = _words("dtype", known)
    if len(dtypes) > 2:  # of two dtypes, "other than A" is the same as "B"
        others = "a dtype other than {}"
        found += [Property(others.format(d), _not(_names("dtype", d))) for d in dtypes]
    for name, (one, many) in _EQUAL.items():
        for value in _values(name, known):
            phrase = one if value == 1 else many.format(value)
            found.append(Property(phrase, _equals(name, value)))
    fitting = []
    for divisor in _DIVISORS:
        divides = _divides("heads", divisor)
        found.append(Property(f"a head count that is not divisible by {divisor}", _not(divides)))
        fitting.append(Property(f"a head count that is divisible by {divisor}", divides))
    for tile in _TILES:
        fills, all_fill = _divides("keys", tile), _divides("seen", tile)
        number = f"whose number of keys is not a multiple of {tile}"
        found.append(Property(f"a row {number}", _not(fills)))
        found.append(Property(f"a query {number}", _not(all_fill)))
        fitting.append(Property(f"a multiple of {tile} keys in each row", fills))
    limits = [(name, limit) for name in _MORE for limit in _limits(_values(name, known))]
    for name, limit in limits:
        found.append(Property(_phrase(_MORE[name], limit), _exceeds(name, limit)))
    for name, limit in limits:
        found.append(Property(_phrase(_LESS[name], limit), _is_within(name, limit)))
    groups = [
        Property(f"the group {word}", _names("group", word)) for word in _words("group", known)
    ]
    return found + fitting + groups


def _phrase(words: str, limit: float) -> str:
    number = f"{limit:g}" if isinstance(limit, float) else str(limit)
    return words.format(number, "" if limit == 1 else "s")


def _has(name: str) -> Callable[[Traits], bool]:
    return lambda traits: bool(traits.get(name))


def _names(name: str, word: str) -> Callable[[Traits], bool]:
    return lambda traits: word in _listed(traits.get(name))


def _equals(name: str, value: float) -> Callable[[Traits], bool]:
    return lambda traits: bool(traits.get(name) == value)


def _exceeds(name: str, limit: float) -> Callable[[Traits], bool]:
    return lambda traits: bool(traits.get(name, limit) > limit)


def _is_within(name: str, limit: float) -> Callable[[Traits], bool]:
    return lambda traits: bool(traits.get(name, limit + 1) <= limit)


def _divides(name: str, divisor: int) -> Callable[[Traits], bool]:
    return lambda traits: not any(number % divisor for number in _listed(traits.get(name)))


def _not(holds: Callable[[Traits], bool]) -> Callable[[Traits], bool]:
    return lambda traits: not holds(traits)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _words(name: str, known: Iterable[Traits]) -> list[str]:
    return sorted({word for traits in known for word in _listed(traits.get(name))})


def _values(name: str, known: Iterable[Traits]) -> list[float]:
    return sorted({v for traits in known if (v := traits.get(name)) is not None})


def _limits(values: Sequence[float]) -> list[float]:
    """Return a limit between each two neighbors; of integers, the one with most factors of 2."""
    return [_roundest(low, high) for low, high in pairwise(values)]


def _roundest(low: float, high: float) -> float:
    if not (isinstance(low, int) and isinstance(high, int)):
        return low
    step = 1
    while (high - 1) // (2 * step) * 2 * step >= max(low, 1):
        step *= 2
    return (high - 1) // step * step
