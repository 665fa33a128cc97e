"""The expected-failures file: exact test ids, each with a reason and a link."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_mla_shared.documents import read_toml
from paged_mla_shared.typed import build

_KEYS = {"test", "reason", "issue"}


@dataclass(frozen=True)
class ExpectedFailure:
    """A test that a backend is known to fail each time.

    Parameters
    ----------
    test : str
        The exact test id from a report, without patterns: ``test_decode[decode-h9-bf16]``.
    reason : str
        A description of the defect.
    issue : str
        The URL of an issue about the defect.
    """

    test: str
    reason: str
    issue: str


def load_expected_failures(path: Path) -> dict[str, ExpectedFailure]:
    """Return the entries of the TOML file `path` by test id.

    Raises
    ------
    ValueError
        The file cannot be read, is not TOML or has other tables; or an entry lacks a test, a reason
        or an issue, has unknown keys or a value that is no text, or repeats an id.
    """
    document = read_toml(path)
    if set(document) - {"expected_failure"}:
        raise ValueError(f"{path}: the file may contain only [[expected_failure]] tables")
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
