"""Compare a kernel's intermediate values of one query token and head with the right values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_mla_reference.explain.render.trace import Part, Trace, plain_numbers, trace_of
from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.taps import Taps

_SHOWN = 8  # keys


@dataclass(frozen=True)
class Number:
    """The right value and the kernel's value of one quantity.

    Parameters
    ----------
    right, tapped : float
        NaN if there is no such value.
    """

    right: float
    tapped: float

    @property
    def error(self) -> float:
        """The absolute difference; infinite if a value is NaN or only one is infinite."""
        if math.isfinite(self.right) and math.isfinite(self.tapped):
            return abs(self.right - self.tapped)
        return 0.0 if self.right == self.tapped else math.inf


@dataclass(frozen=True)
class PartComparison:
    """The values of one part of the keys.

    Parameters
    ----------
    first, last : int
        Keys of the row, both included.
    highest, total, lse : Number
        The largest score, the sum of ``exp(s - highest)``, and the lse of the part.
    out_error : float
        The largest error of the elements of the part's out; NaN if the rules have no part with
        these keys.
    """

    first: int
    last: int
    highest: Number
    total: Number
    lse: Number
    out_error: float


@dataclass(frozen=True)
class TapComparison:
    """All values of one query token and head.

    Parameters
    ----------
    trace : Trace
        The right values, with the kernel's parts of the keys.
    scores, weights : dict of int to Number
        By key, for each key that the rules or the kernel see.
    parts : list of PartComparison
    lse : Number
    out_error : float
        The largest error of the elements of out.
    """

    trace: Trace
    scores: dict[int, Number]
    weights: dict[int, Number]
    parts: list[PartComparison]
    lse: Number
    out_error: float

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name; NaN and infinite numbers become ``None``."""
        return plain_numbers(self)

    def text(self) -> str:
        """Return the comparison as text: the keys that differ most, then parts, then output."""
        trace = self.trace
        lines = [
            f"token {trace.token}, head {trace.head}: row {trace.row}, position {trace.position}",
            "",
            "keys that differ most    score, right   tapped   weight, right   tapped",
        ]
        for key in sorted(self.scores, key=lambda k: -self.scores[k].error)[:_SHOWN]:
            score, weight = self.scores[key], self.weights[key]
            lines.append(
                f"{key:20} {score.right:16.6g} {score.tapped:8.6g} "
                f"{weight.right:15.4%} {weight.tapped:8.4%}"
            )
        lines += ["", "keys               max, right   tapped   sum, right   tapped   out off by"]
        for part in self.parts:
            span = f"{part.first} to {part.last}"
            highest, total = part.highest, part.total
            lines.append(
                f"{span:16} {highest.right:12.6g} {highest.tapped:8.6g} "
                f"{total.right:12.6g} {total.tapped:8.6g} {part.out_error:12.2g}"
            )
        lse = f"right {self.lse.right:.8g}, tapped {self.lse.tapped:.8g}"
        return "\n".join([*lines, "", f"lse {lse}; out off by {self.out_error:.2g}"])


def compare_taps(dump: Dump, taps: Taps) -> TapComparison:
    """Compare taps with the exact values of the same query token and head (S-5, S-7, S-8).

    Raises
    ------
    InvalidArgument
        As :func:`~paged_mla_reference.explain.render.trace.trace_of`; or the out of the taps has
        another number of elements than the dump's latents.
    """
    rank = dump.problem.dims.kv_lora_rank
    if len(taps.out) != rank:
        raise InvalidArgument("taps", f"{len(taps.out)} elements of out", f"{rank}, as in the dump")
    trace = trace_of(dump, taps.token, taps.head, spans=taps.spans)
    right = dict(zip(trace.keys, zip(trace.scores, trace.weights, strict=True), strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(taps.scores.astype(np.float64) - float(taps.lse)).tolist()
    values = zip(taps.scores.tolist(), weights, strict=True)
    tapped = dict(zip(taps.keys.tolist(), values, strict=True))
    none = (math.nan, math.nan)
    pairs = {k: (right.get(k, none), tapped.get(k, none)) for k in sorted(right | tapped)}
    return TapComparison(
        trace=trace,
        scores={key: Number(mine[0], theirs[0]) for key, (mine, theirs) in pairs.items()},
        weights={key: Number(mine[1], theirs[1]) for key, (mine, theirs) in pairs.items()},
        parts=[
            _part(_part_within(trace, first, last), taps, number)
            for number, (first, last) in enumerate(taps.spans.tolist())
        ],
        lse=Number(trace.lse, float(taps.lse)),
        out_error=_largest(trace.out, taps.out),
    )


def _part_within(trace: Trace, first: int, last: int) -> Part | None:
    """Return the part of the visible keys in a span; the kernel may have read more keys."""
    return next((p for p in trace.parts if first <= p.first and p.last <= last), None)


def _part(right: Part | None, taps: Taps, number: int) -> PartComparison:
    first, last = taps.spans[number].tolist()
    mine = (math.nan,) * 3 if right is None else (right.highest, right.total, right.lse)
    theirs = taps.highest[number], taps.total[number], taps.part_lse[number]
    highest, total, lse = (Number(a, float(b)) for a, b in zip(mine, theirs, strict=True))
    error = math.nan if right is None else _largest(right.out, taps.part_out[number])
    return PartComparison(first, last, highest, total, lse, error)


def _largest(right: list[float], tapped: np.ndarray) -> float:
    """Return the largest absolute difference of two vectors."""
    return float(np.abs(np.array(right) - tapped).max())
