"""The corpus: files with cases and schedules that failed once. A search runs them first."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_reference.simulator.scenario import Scenario, load_scenario
from paged_mla_shared.backend import OPERATIONS, Backend
from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.dims import SMALL, MlaDims
from paged_mla_shared.documents import read_object, take_version
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE, check_format
from paged_mla_shared.problem import Mask
from paged_mla_shared.typed import build

CORPUS = Path(__file__).with_name("corpus")
VERSION = 1
MOST_KEYS = 1 << 19  # in one step
MOST_QUERIES = 1 << 12  # in one step
MOST_STEPS = 64
MOST_PAIRS = 1 << 28  # pairs of query token and key in all heads; minutes for the reference
ASKED = ("plan", "append", "attend")
"""The operations that a backend must have for a case."""
_LIMITS = {
    "num_heads": (1, 128),
    "block_size": (1, 1 << 12),
    "padded_tokens": (0, 1 << 10),
    "table_width": (0, 1 << 12),
    "packed_padding": (0, 1 << 8),
    "spare": (1, 16),
    "token_padding": (0, 1 << 12),
    "block_padding": (0, 1 << 12),
    "cache_elements": (0, 1 << 33),
    "cache_blocks": (0, 1 << 25),
}


def corpus_files() -> list[Path]:
    """Return the sorted paths of all files in the corpus."""
    return sorted(CORPUS.glob("*.json"))


def load_replay(path: Path) -> tuple[Case, str] | Scenario:
    """Return the case and its element type, or the schedule, of a replay file.

    Raises
    ------
    InvalidArgument
        The file is not a JSON object, has another version of the format, or contains neither a
        valid case of limited size nor a schedule.
    """
    return load_case(path) if "case" in read_object(path) else load_scenario(path)


def save_case(case: Case, dtype: str, path: Path) -> None:
    """Write a case and its element type as JSON."""
    document = {"version": VERSION, "dtype": dtype, "case": asdict(case)}
    path.write_text(json.dumps(document) + "\n")


def load_case(path: Path) -> tuple[Case, str]:
    """Return the case and the element type of a file that :func:`save_case` wrote.

    Raises
    ------
    InvalidArgument
        The file has another version of the format, or contains no valid case or too large a case.
    """
    fields = read_object(path)
    take_version(fields, "version", VERSION, str(path))
    document: _Document = build(_Document, fields, str(path))
    return document.case, document.dtype


@dataclass(frozen=True)
class _Document:
    dtype: str
    case: Case

    def __post_init__(self) -> None:
        if self.dtype not in PLAIN_FORMAT_OF_DTYPE:
            allowed = f"one of {', '.join(PLAIN_FORMAT_OF_DTYPE)}"
            raise InvalidArgument("dtype", repr(self.dtype), allowed)
        try:
            check_format(self.case.cache_format)
        except InvalidArgument as error:
            raise InvalidArgument(f"case.{error.argument}", error.given, error.allowed) from None
        for name, (least, largest) in _LIMITS.items():
            value = getattr(self.case, name)
            if value is not None and not least <= value <= largest:
                raise InvalidArgument(f"case.{name}", value, f"{least} to {largest}")
        for name in ("token_padding", "block_padding"):
            if getattr(self.case, name) % 2:
                raise InvalidArgument(f"case.{name}", getattr(self.case, name), "even numbers")
        for rows in self.case.steps:
            _check_rows(rows, self.case.mask)
        _check_work(self.case)
        validate_problem(self.case.problem(SMALL, self.dtype))


def _check_work(case: Case) -> None:
    """Check that a case is small enough to be computed in minutes.

    A small file can describe a very large case.
    """
    if len(case.steps) > MOST_STEPS:
        raise InvalidArgument("case.then", f"{len(case.steps)} steps", f"at most {MOST_STEPS}")
    num_heads = SMALL.num_heads if case.num_heads is None else case.num_heads
    pairs = num_heads * sum(row.query_len * row.seq_len for rows in case.steps for row in rows)
    if pairs > MOST_PAIRS:
        given = f"{pairs:,} pairs of a query and a key in {num_heads} heads"
        raise InvalidArgument("case.rows", given, f"at most {MOST_PAIRS:,}")


def _check_rows(rows: tuple[Row, ...], mask: Mask) -> None:
    for number, row in enumerate(rows):
        where = f"case: row {number} of 0 to {len(rows) - 1}"
        is_short = 0 < row.seq_len < row.query_len and mask is not Mask.NON_CAUSAL
        if min(row.seq_len, row.query_len) < 0 or is_short:
            given = f"mask {mask}, seq_len {row.seq_len}, query_len {row.query_len}"
            allowed = "0 <= query_len <= seq_len, seq_len 0, or mask non_causal and lengths >= 0"
            raise InvalidArgument(where, given, allowed)
        other = row.shares_prefix_of
        if other is not None and not 0 <= other < number:
            raise InvalidArgument(where, f"shares_prefix_of {other}", "an earlier row")
    keys, queries = sum(row.seq_len for row in rows), sum(row.query_len for row in rows)
    if keys > MOST_KEYS or queries > MOST_QUERIES:
        allowed = f"at most {MOST_KEYS} and {MOST_QUERIES} in one step"
        raise InvalidArgument("case: rows", f"{keys} keys, {queries} query tokens", allowed)


def check_case(backend: Backend, case: Case, dims: MlaDims, dtype: str) -> None:
    """Check every step of a case on one runner, and compare it bit for bit with a new runner.

    The function also checks the declared operations that read rows.

    For a case with explicit slots only the append is checked, because the append does not fill the
    rows that attention reads.

    Raises
    ------
    Mismatch
        A result is wrong. All exceptions of the backend are raised too.
    """
    trial = Trial(backend, case, dims, dtype)
    if case.explicit_slots:
        trial.check_append()
    else:
        trial.check_replay()
        for operation in OPERATIONS.values():
            if operation.reads_rows and operation.name in backend.capabilities.ops:
                trial.check_read(operation.name)
