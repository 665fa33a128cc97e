"""How the right answer of one query and head comes about: scores, weights, parts, sums."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.dump_checks import without_cache
from paged_mla_reference.explain.checks.query_view import query_of, row_of, scores_of
from paged_mla_reference.explain.checks.step import QUERIES, Step, is_valid
from paged_mla_reference.rules.attention import weighted_mean
from paged_mla_reference.rules.cache import read_slots
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import query_spans, slots_of
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import InvalidArgument

_HEAVIEST = 8  # keys that are told
_ELEMENTS = 6  # of an output that are printed


@dataclass(frozen=True)
class Part:
    """A share of the keys: numbers of one split.

    Parameters
    ----------
    first, last : int
        Keys of the row.
    highest, total, lse : float
        Largest score, sum of ``exp(s - highest)``, and their lse (S-7).
    out : list of float
        Mean of its values, [R] (S-5).
    """

    first: int
    last: int
    highest: float
    total: float
    lse: float
    out: list[float]


@dataclass(frozen=True)
class Trace:
    """Intermediate values of one query token and head.

    Parameters
    ----------
    token, head, row, position : int
    keys : list of int
        Those it sees.
    slots : list of int
        Where they lie.
    scores, weights : list of float
        Scaled scores, and what each key weighs: they sum to 1.
    parts : list of Part
        In splits of equal numbers of keys.
    lse : float
        In float32 (S-7).
    out : list of float
        Of all keys, wherever the parts end (S-8).
    actual_lse, actual_out : float, list of float, or None
        The dump's.
    """

    token: int
    head: int
    row: int
    position: int
    keys: list[int]
    slots: list[int]
    scores: list[float]
    weights: list[float]
    parts: list[Part]
    lse: float
    out: list[float]
    actual_lse: float | None
    actual_out: list[float] | None

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name; ``None`` stands for what is not finite."""
        return plain_numbers(self)

    def text(self) -> str:
        """Return what a person reads."""
        place = f"row {self.row}, position {self.position}"
        lines = [
            f"token {self.token}, head {self.head}: {place}, sees {len(self.keys)} keys",
            "",
            "heaviest keys    slot       score      weight",
        ]
        columns = np.array([self.keys, self.slots, self.scores, self.weights]).T
        heaviest = columns[np.argsort(self.scores)[::-1][:_HEAVIEST]].tolist()  # NaN first
        lines += [f"{k:13.0f} {at:7.0f} {s:11.6g} {w:11.4%}" for k, at, s, w in heaviest]
        lines += ["", "keys                  max         sum         lse  out"]
        for part in self.parts:
            span = f"{part.first} to {part.last}"
            numbers = f"{part.highest:11.6g} {part.total:11.6g} {part.lse:11.6g}"
            lines.append(f"{span:14} {numbers}  {_told(part.out)}")
        lines += ["", f"right:  lse {self.lse:.8g}  out {_told(self.out)}"]
        if self.actual_out is not None or self.actual_lse is not None:
            lse = "absent" if self.actual_lse is None else f"{self.actual_lse:.8g}"
            out = "absent" if self.actual_out is None else _told(self.actual_out)
            lines.append(f"dumped: lse {lse}  out {out}")
        return "\n".join(lines)


def plain_numbers(record: Any) -> dict[str, Any]:
    """Return a dataclass as plain data that JSON has: ``None`` for what is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(item) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    found: dict[str, Any] = plain(asdict(record))
    return found


def _told(out: list[float]) -> str:
    return " ".join(f"{x:9.5g}" for x in out[:_ELEMENTS]) + (" ..." if len(out) > _ELEMENTS else "")


def trace_of(
    dump: Dump,
    token: int,
    head: int,
    *,
    splits: int = 1,
    spans: NDArray[np.int64] | None = None,
) -> Trace:
    """Return the intermediate values of one query token and head, exact (S-4, S-5, S-7, S-8).

    Parameters
    ----------
    dump : Dump
        With lengths, table, queries and a cache.
    token, head : int
    splits : int
        Parts of the keys, at most as many as there are keys.
    spans : int64 [S, 2] or None
        First and last key of each part, instead of equal ones.

    Raises
    ------
    InvalidArgument
        The dump lacks what it takes, there is no such token or head, or it sees no key.
    """
    step = Step.of(dump)
    batch = step.batch
    lacking = "" if step.has(*QUERIES) else "no queries"
    if batch is None or not is_valid(step):
        lacking = "no batch that the rules allow"
    lacking = lacking or without_cache(step)
    if lacking:
        raise InvalidArgument("dump", lacking, "lengths, block_table, queries and a cache")
    assert batch is not None
    assert step.after is not None
    live = int(batch.cu_seqlens_q[-1])
    if not 0 <= token < live:
        raise InvalidArgument("token", token, f"0 to {live - 1}, of the rows")
    heads = step.problem.dims.num_heads
    if not 0 <= head < heads:
        raise InvalidArgument("head", head, f"0 to {heads - 1}")
    row = row_of(batch, token)
    seen = visibility(step.problem, batch)[row][token - query_spans(batch)[row].start]
    keys = np.flatnonzero(seen)
    if not keys.size:
        raise InvalidArgument("token", f"{token}, which sees no key", "one that sees some")
    if splits > keys.size:
        raise InvalidArgument("splits", splits, f"at most its {keys.size} keys")
    size = step.problem.block_size
    blocks = batch.block_table[row, : -(-len(seen) // size)].astype(np.int64)
    scores = scores_of(step, query_of(step, token)[head : head + 1], blocks)[0, keys]
    slots = slots_of(batch.block_table[row], keys, size)
    values = widen(read_slots(step.after, slots)[0])
    shares = np.array_split(np.arange(keys.size), splits)
    if spans is not None:
        shares = [np.flatnonzero((keys >= first) & (keys <= last)) for first, last in spans]
    out, lse = weighted_mean(scores[None], values, "float32", Rounding.EXACT)
    parts = []
    for some in filter(len, shares):
        mean, of_part = weighted_mean(scores[None, some], values[some], "float32", Rounding.EXACT)
        highest = float(scores[some].max())
        total = float(np.exp(scores[some] - highest).sum())
        first, last = int(keys[some[0]]), int(keys[some[-1]])
        parts.append(Part(first, last, highest, total, float(of_part[0]), mean[0].tolist()))
    actual = step.lse
    return Trace(
        token=token,
        head=head,
        row=row,
        position=int(metadata(step.problem, batch).positions[token]),
        keys=keys.tolist(),
        slots=slots.tolist(),
        scores=scores.tolist(),
        weights=np.exp(scores - lse).tolist(),
        parts=parts,
        lse=float(round_to(lse, "float32")[0]),
        out=out[0].tolist(),
        actual_lse=None if actual is None else float(actual[token, head]),
        actual_out=widen(step.array("out")[token, head]).tolist() if step.has("out") else None,
    )
