"""A table of what ``cells.py`` timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from paged_mla_optimized.tools.bench.table import head_of, row_of

ATTENTION = "attention"
"""In place of a backend's name: milliseconds of our kernel, for all layers."""
_PLACE = "{engine}, {device}, torch {torch}, triton {triton}, commit {commit}, {date}"


_NUMBERS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "medians": ("ms", median),
    "leasts": ("ms", min),
    "busy": ("busy_ms", median),
}
"""What a ratio is of: times by the clock, or those in which the GPU is busy."""
_CONFIDENCE = 0.95


def table(folder: Path, heads: int, ours: str, step: str) -> str:
    """Return the cells of a head count as Markdown: `ours` beside every other that was timed."""
    timed = {
        path.stem.split("-", 1)[1]: json.loads(path.read_text())
        for path in sorted(folder.glob(f"{heads}-*.json"))
    }
    attention = timed.pop(ATTENTION, {"cells": {}})["cells"]
    names = [ours, *(name for name in timed if name != ours)]
    columns = [f"{heads} heads: rows x context", *names]
    columns += [f"best other / {ours}: {word}" for word in (*_NUMBERS, "turns")]
    lines = [*_places(timed), "", head_of([*columns, "attention's part"])]
    ratios: dict[str, list[float]] = {word: [] for word in _NUMBERS}
    heavy: dict[str, list[float]] = {word: [] for word in _NUMBERS}
    intervals = []
    for cell in timed.get(ours, {"cells": {}})["cells"]:
        found = {name: one["cells"][cell] for name, one in timed.items() if cell in one["cells"]}
        part = None
        if cell in attention:
            part = median(attention[cell]["ms"]) / median(found[ours]["ms"])
        of_cell = {word: _ratio(found, ours, *number) for word, number in _NUMBERS.items()}
        for word, ratio in of_cell.items():
            ratios[word] += [] if ratio is None else [ratio]
            heavy[word] += [] if ratio is None or part is None or part <= 0.5 else [ratio]
        shown = [_shown(found[name]) if name in found else "" for name in names]
        numbers = [_number(ratio, ".3f") for ratio in of_cell.values()]
        turns = _of_turns(timed, cell, ours)
        intervals += [turns] if turns else []
        of_turns = "{:.3f} ({:.3f} to {:.3f})".format(*turns) if turns else ""
        lines.append(row_of([cell, *shown, *numbers, of_turns, _number(part, ".0%")]))
    told = [f"ms per {step}, median (least to most), and for how many of them the GPU is busy."]
    told += _summary("Ratios", ratios)
    told += _summary("Where attention is over half of the step", heavy)
    if intervals:
        middles, _, highs = zip(*intervals, strict=True)
        told.append(
            f"Ratios of times in the same turn, their median and where it lies with a probability "
            f"of {_CONFIDENCE:.0%}: geometric mean {geometric_mean(middles):.3f}, least "
            f"{min(middles):.3f}, least upper end {min(highs):.3f} of {len(middles)}."
        )
    return "\n".join([*lines, "", " ".join(told)]) + "\n"


def _places(timed: dict[str, Any]) -> list[str]:
    """Return on what was timed, and by which commands."""
    facts = [found["facts"] for found in timed.values()]
    places = dict.fromkeys(f"{_PLACE.format(**one)}, {one['layers']} layers." for one in facts)
    return [*places, *dict.fromkeys(f"`{one['command']}`" for one in facts)]


def _shown(found: dict[str, list[float]]) -> str:
    ms = found["ms"]
    busy = f", busy {median(found['busy_ms']):.3f}" if "busy_ms" in found else ""
    return f"{median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f}){busy}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(
    found: dict[str, dict[str, list[float]]],
    ours: str,
    what: str,
    number: Callable[[list[float]], float],
) -> float | None:
    """Return the best other's time over ours, or nothing where one of them is not known."""
    times = {name: number(one[what]) for name, one in found.items() if what in one}
    mine = times.pop(ours, None)
    return min(times.values()) / mine if times and mine is not None else None


def _of_turns(timed: dict[str, Any], cell: str, ours: str) -> tuple[float, float, float] | None:
    """Return the median of the best other's time over ours in the same turn, and its interval.

    Nothing where engines did not live together, or the turns are too few for an interval.
    """
    together = {
        name: _turns(one["cells"][cell]["ms"], one["facts"].get("repeats", 1))
        for name, one in timed.items()
        if one["facts"].get("together") and cell in one["cells"]
    }
    mine = together.pop(ours, [])
    found = [
        (median(ratios), *interval)
        for times in together.values()
        # Who failed, or had no time left, has none of the turns that followed.
        if (ratios := [his / own for his, own in zip(times, mine, strict=False)])
        and (interval := interval_of_median(ratios))
    ]
    return min(found, default=None)


def _turns(ms: list[float], repeats: int) -> list[float]:
    """Return one time of each turn: its windows follow each other, and would count as one."""
    return [median(ms[first : first + repeats]) for first in range(0, len(ms), repeats)]


def interval_of_median(values: list[float]) -> tuple[float, float] | None:
    """Return the narrowest two of the values between which the median lies, at 95 % or more.

    Whatever they are drawn from: each lies below the median as often as above. Six are needed.
    """
    count, outside, cut = len(values), 0.0, 0
    while (outside := outside + 2 * comb(count, cut) / 2**count) <= 1 - _CONFIDENCE:
        cut += 1
    return (sorted(values)[cut - 1], sorted(values)[-cut]) if cut else None


def _summary(what: str, ratios: dict[str, list[float]]) -> list[str]:
    return [
        f"{what}, of {word}: geometric mean {geometric_mean(many):.3f}, least {min(many):.3f} "
        f"of {len(many)}."
        for word, many in ratios.items()
        if many
    ]
