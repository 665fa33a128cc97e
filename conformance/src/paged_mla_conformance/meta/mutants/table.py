"""Make the table of the quick verdict from a run of every test on every mutant."""

from __future__ import annotations

from collections.abc import Sequence

from paged_mla_conformance.meta.mutants.kill import Kills
from paged_mla_conformance.run.quick.table import Entry
from paged_mla_reference.faults import Kind, of_kind

_SLOWER = 1.5  # a slower test may replace another test if it takes at most this many times as long
_SHORT_MS = 100.0  # a slower test may replace another test if it takes at most this long


def table_of(kills: Sequence[Kills], right: Kills) -> dict[str, Entry]:
    """Return the faults that each test finds.

    Tests that find no fault and tests that another test replaces are left out.

    A test replaces another test if it finds every fault that the other test finds, needs only
    capabilities that the other test needs, and takes at most 1.5 times as long or at most 100 ms.
    For every declaration of a backend, the remaining tests find every fault that all tests find.
    Engine mutants are left out, because they are not faults of a backend.

    Parameters
    ----------
    kills : sequence of Kills
        The kills of all mutants in a run of every test.
    right : Kills
        The times and needs of every test, from the right backend in every format.
    """
    of_engine = of_kind(Kind.ENGINE)
    finds = {
        key: frozenset(k.name for k in kills if key in k.tests and k.name not in of_engine)
        for key in right.tests
    }
    entries = {key: Entry(round(right.tests[key], 1), found) for key, found in finds.items()}
    left = {key: entry for key, entry in entries.items() if entry.finds}
    for key in sorted(left, key=lambda key: (len(left[key].finds), -left[key].ms, key)):
        if any(_replaces(right, left, other, key) for other in left if other != key):
            del left[key]
    return left


def _replaces(right: Kills, left: dict[str, Entry], other: str, key: str) -> bool:
    """Return whether the test `other` replaces the test `key` (see :func:`table_of`)."""
    mine, theirs = left[key], left[other]
    needs, length = _parts(right.needs[key])
    other_needs, other_length = _parts(right.needs[other])
    return (
        theirs.finds >= mine.finds
        and other_needs <= needs
        and other_length <= length
        and theirs.ms <= max(_SLOWER * mine.ms, _SHORT_MS)
    )


def _parts(needs: frozenset[str]) -> tuple[frozenset[str], int]:
    """Return the needs without those for a query length, and the largest of these lengths."""
    lengths = {need for need in needs if need.startswith("query_len ")}
    return needs - lengths, max((int(need.split()[1]) for need in lengths), default=0)
