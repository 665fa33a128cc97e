"""Which known faults each test finds, and what it costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Entry:
    """One test.

    Parameters
    ----------
    ms : float
        What the reference took for it.
    finds : frozenset of str
        Names of the mutants that fail it by a rule which they break.
    """

    ms: float
    finds: frozenset[str]


@cache
def load_table() -> dict[str, Entry]:
    """Return every test of the table by its key."""
    document = json.loads(FILE.read_text())
    mutants = document["mutants"]
    return {
        key: Entry(ms, frozenset(mutants[number] for number in _numbers(bits)))
        for key, (ms, bits) in document["tests"].items()
    }


def to_json(table: dict[str, Entry]) -> str:
    """Return a table as text: names of the mutants, and a line for each test.

    What a test finds is a number in hexadecimal; bit ``i`` stands for the mutant ``i``.
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
