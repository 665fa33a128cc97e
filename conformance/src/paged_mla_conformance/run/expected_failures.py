"""The expected-failures file: exact ids with a reason and a place to read more, strictly held."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_mla_shared.documents import read_toml
from paged_mla_shared.typed import build

_KEYS = {"test", "reason", "issue"}


@dataclass(frozen=True)
class ExpectedFailure:
    """One deterministic case a backend is known to fail.

    Parameters
    ----------
    test : str
        Exact test id as reports print it, no patterns: ``test_decode[decode-h9-bf16]``.
    reason : str
        What is wrong, in words.
    issue : str
        URL of the report about it.
    """

    test: str
    reason: str
    issue: str


def load_expected_failures(path: Path) -> dict[str, ExpectedFailure]:
    """Return the entries of `path` by test id.

    Raises
    ------
    ValueError
        An entry lacks a test, a reason or an issue, has unknown keys, or repeats an id.
    """
    document = read_toml(path)
    if set(document) - {"expected_failure"}:
        raise ValueError(f"{path}: only [[expected_failure]] tables are allowed")
    entries: dict[str, ExpectedFailure] = {}
    kind, where = tuple[dict[str, Any], ...], f"{path}: expected_failure"
    tables = build(kind, document.get("expected_failure", []), where)
    for number, table in enumerate(tables, start=1):
        if set(table) != _KEYS or not all(isinstance(v, str) and v for v in table.values()):
            raise ValueError(
                f"{path}: entry {number} must have exactly the non-empty strings {sorted(_KEYS)}"
            )
        if table["test"] in entries:
            raise ValueError(f"{path}: {table['test']} is listed twice")
        entries[table["test"]] = ExpectedFailure(**table)
    return entries
