"""Choose the tests of a quick verdict from those that pytest has collected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest

from paged_mla_conformance.run.quick.choice import OVERHEAD_MS, Claim, choose
from paged_mla_conformance.run.quick.keys import key_of
from paged_mla_conformance.run.quick.table import load_table
from paged_mla_conformance.suite.selection.items import param_of, test_id, why_not_asked
from paged_mla_reference.faults import IN_16_BITS

QUICK = pytest.StashKey[Claim]()


def cost_of(item: pytest.Item) -> float:
    """Return the time that a test is expected to take, in a unit that all tests of a run share.

    In a quick run, it is the reference's time for the test plus :data:`OVERHEAD_MS`. In a whole run
    it is 1 for every test: its time depends on the backend, and many tests average out.
    """
    if QUICK in item.config.stash:
        return load_table()[key_of(item)].ms + OVERHEAD_MS
    return 1.0


def quick_choice(items: Sequence[pytest.Item]) -> tuple[Claim, list[pytest.Item]]:
    """Return the data from which the run reports what the chosen tests can find, and these tests.

    The tests use the element types of the run in rotation. A test that finds faults of 16 bits uses
    a type of 16 bits if the backend supports the test in one. A run without 16-bit types does not
    count the faults of 16 bits.
    """
    table = load_table()
    declared: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if key_of(item) in table and why_not_asked(item) is None:
            declared[key_of(item)].append(item)
    for key, of_key in declared.items():
        if table[key].finds & IN_16_BITS:
            declared[key] = [item for item in of_key if _has_16_bits(item)] or of_key
    if not any(map(_has_16_bits, chain(*declared.values()))):
        table = {
            key: replace(entry, finds=entry.finds - IN_16_BITS) for key, entry in table.items()
        }
    choice = choose(table, declared)
    chosen = {id(declared[key][turn % len(declared[key])]) for turn, key in enumerate(choice.keys)}
    some = [item for item in items if id(item) in chosen]
    finds = {test_id(item): sorted(table[key_of(item)].finds) for item in some}
    return Claim(choice.findable, finds), some


def _has_16_bits(item: pytest.Item) -> bool:
    param = param_of(item)
    return param is not None and param.dtype != "float32"
