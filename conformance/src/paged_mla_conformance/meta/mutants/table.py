"""The table of the quick verdict, from every mutant put to every test."""

from __future__ import annotations

from collections.abc import Sequence

from paged_mla_conformance.meta.mutants.kill import Kills
from paged_mla_conformance.run.quick.table import Entry
from paged_mla_reference.faults import Kind, of_kind

_SLOWER = 1.5  # how much longer than a test one may take that replaces it
_SHORT_MS = 100.0  # below this, what a test takes does not matter


def table_of(kills: Sequence[Kills], right: Kills) -> dict[str, Entry]:
    """Return what each test finds, without the tests that another one replaces.

    One test replaces another if it finds every fault that the other finds, needs only capabilities
    that the other needs too, and takes at most 1.5 times as long as the other or at most 100 ms.
    Whatever a backend declares, the tests that stay find every fault that all tests would find.
    The table leaves out mutants of the simulated engine, which are no faults of a backend.

    Parameters
    ----------
    kills : sequence of Kills
        Of mutants that were put to every test.
    right : Kills
        Of the right backend in every format: times and needs of every test.
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
    """Return needs without the longest query among them, and its length."""
    lengths = {need for need in needs if need.startswith("query_len ")}
    return needs - lengths, max((int(need.split()[1]) for need in lengths), default=0)
