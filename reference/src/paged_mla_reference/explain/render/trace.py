"""Compute the intermediate values of one right output: scores, weights, parts and sums."""

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

_HEAVIEST = 8  # keys that are printed
_ELEMENTS = 6  # elements of an output that are printed


@dataclass(frozen=True)
class Part:
    """The values of one part of the keys.

    Parameters
    ----------
    first, last : int
        Keys of the row, both included.
    highest, total, lse : float
        The largest score, the sum of ``exp(s - highest)``, and the lse of the part (S-7).
    out : list of float
        The weighted mean of the part's latents, [R] (S-5).
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
        The keys that the token sees.
    slots : list of int
        The slot of each key.
    scores, weights : list of float
        The scaled score and the weight of each key; the weights sum to 1.
    parts : list of Part
        Parts without keys are omitted.
    lse : float
        The right lse, rounded to float32 (S-7).
    out : list of float
        The right output, which does not depend on the parts (S-8).
    actual_lse, actual_out : float, list of float, or None
        The dump's output; ``None`` if the dump lacks it.
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
        """Return all numbers by name; NaN and infinite numbers become ``None``."""
        return plain_numbers(self)

    def text(self) -> str:
        """Return the trace as text."""
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
    """Return a dataclass as data for JSON; NaN and infinite numbers become ``None``."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(item) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    found: dict[str, Any] = plain(asdict(record))
    return found


def _told(out: list[float]) -> str:
    """Return the first elements of an output as text."""
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
        It must have lengths, block table, queries and a cache.
    token, head : int
    splits : int
        The number of parts, from 1 to the number of keys that the token sees. Their numbers of keys
        differ by at most 1.
    spans : int64 [S, 2] or None
        The first and the last key of each part, instead of `splits` parts.

    Raises
    ------
    InvalidArgument
        The dump lacks a field or is not valid, the token or the head does not exist, the token sees
        no key, or it sees fewer keys than `splits`.
    """
    step = Step.of(dump)
    batch = step.batch
    lacking = "" if step.has(*QUERIES) else "a dump without queries"
    if lacking and step.layer is not None:
        lacking = "a dump of a whole layer, whose queries are not absorbed"
    if batch is None or not is_valid(step):
        lacking = "a dump without a valid batch"
    lacking = lacking or without_cache(step)
    if lacking:
        raise InvalidArgument("dump", lacking, "lengths, block_table, queries and a cache")
    assert batch is not None
    assert step.after is not None
    live = int(batch.cu_seqlens_q[-1])
    if not 0 <= token < live:
        raise InvalidArgument("token", token, f"0 to {live - 1}, the tokens of rows")
    heads = step.problem.dims.num_heads
    if not 0 <= head < heads:
        raise InvalidArgument("head", head, f"0 to {heads - 1}")
    row = row_of(batch, token)
    seen = visibility(step.problem, batch)[row][token - query_spans(batch)[row].start]
    keys = np.flatnonzero(seen)
    if not keys.size:
        raise InvalidArgument("token", f"{token}, which sees no key", "a token that sees keys")
    if splits > keys.size:
        raise InvalidArgument("splits", splits, f"at most {keys.size}, the keys of the token")
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
