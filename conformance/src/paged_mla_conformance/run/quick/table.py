"""The table of the known faults that each test finds, and of the time that each test takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Entry:
    """The entry of one test.

    Parameters
    ----------
    ms : float
        Milliseconds that the reference took for the test.
    finds : frozenset of str
        Names of the mutants that fail the test because of a rule that they break.
    """

    ms: float
    finds: frozenset[str]


@cache
def load_table() -> dict[str, Entry]:
    """Return the entry of every test in the table by the key of the test."""
    document = json.loads(FILE.read_text())
    mutants = document["mutants"]
    return {
        key: Entry(ms, frozenset(mutants[number] for number in _numbers(bits)))
        for key, (ms, bits) in document["tests"].items()
    }


def to_json(table: dict[str, Entry]) -> str:
    """Return a table as JSON: the names of the mutants, and a line for each test.

    The faults that a test finds are a hexadecimal number. Bit ``i`` is set if the test finds mutant
    ``i``.
    """
    mutants = sorted(frozenset[str]().union(*(entry.finds for entry in table.values())))
    number = {name: i for i, name in enumerate(mutants)}
    lines = []
    for key, entry in sorted(table.items()):
        bits = sum(1 << number[name] for name in entry.finds)
        lines.append(f"  {json.dumps(key)}: [{entry.ms:g}, {json.dumps(f'{bits:x}')}]")
    names = ",\n".join(f"  {json.dumps(name)}" for name in mutants)
    tests = ",\n".join(lines)
    return f'{{\n "mutants": [\n{names}\n ],\n "tests": {{\n{tests}\n }}\n}}\n'


def _numbers(bits: str) -> list[int]:
    value = int(bits, 16)
    return [i for i in range(value.bit_length()) if value >> i & 1]
