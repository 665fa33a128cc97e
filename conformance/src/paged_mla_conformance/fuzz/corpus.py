"""Cases and schedules that broke a backend once, as files that are asked again first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paged_mla_conformance.trial import Trial
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases.case import Case, Row, TableTail, Tree
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

CORPUS = Path(__file__).with_name("corpus")
VERSION = 1


def corpus_files() -> list[Path]:
    """Return every file of the corpus, in order."""
    return sorted(CORPUS.glob("*.json"))


def is_case(path: Path) -> bool:
    """Return whether a replay file holds a case; else it holds a schedule."""
    return "case" in json.loads(path.read_text())


def save_case(case: Case, dtype: str, path: Path) -> None:
    """Write a case and its element type as JSON."""
    document = {"version": VERSION, "dtype": dtype, "case": asdict(case)}
    path.write_text(json.dumps(document) + "\n")


def load_case(path: Path) -> tuple[Case, str]:
    """Read what :func:`save_case` wrote.

    Raises
    ------
    InvalidArgument
        Another version of the format.
    """
    document: dict[str, Any] = json.loads(path.read_text())
    if document["version"] != VERSION:
        raise InvalidArgument("version", document["version"], f"{VERSION}")
    fields = document["case"]
    changed = {
        "rules": tuple(fields["rules"]),
        "rows": _rows(fields["rows"]),
        "then": tuple(_rows(step) for step in fields["then"]),
        "features": tuple(fields["features"]),
        "mask": Mask(fields["mask"]),
        "mask_spelling": MaskSpelling(fields["mask_spelling"]),
        "tree": Tree(fields["tree"]),
        "table_tail": TableTail(fields["table_tail"]),
        "rope": _rope(fields["rope"]),
    }
    return Case(**{**fields, **changed}), document["dtype"]


def check_case(backend: Backend, case: Case, dims: MlaDims, dtype: str) -> None:
    """Ask one case: every step, then each of them again on a fresh runner.

    With slots of its own a step does not fill the rows that it reads, so only its write is asked.

    Raises
    ------
    Mismatch, or whatever the backend raises
    """
    trial = Trial(backend, case, dims, dtype)
    if case.explicit_slots:
        trial.check_append()
    else:
        trial.check_replay()


def _rows(rows: list[dict[str, Any]]) -> tuple[Row, ...]:
    return tuple(Row(**row) for row in rows)


def _rope(fields: dict[str, Any] | None) -> Rope | None:
    if fields is None:
        return None
    rope = Rope(**{**fields, "pairing": RopePairing(fields["pairing"])})
    return rope if rope.yarn is None else replace(rope, yarn=Yarn(**fields["yarn"]))
