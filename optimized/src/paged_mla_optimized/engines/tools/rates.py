"""A table of what ``cells.py`` timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from paged_mla_optimized.tools.bench.table import head_of, row_of

ATTENTION = "attention"
"""In place of a backend's name: milliseconds of our kernel, for all layers."""
_PLACE = "{engine}, {device}, torch {torch}, triton {triton}, commit {commit}, {date}"


def table(folder: Path, heads: int, ours: str) -> str:
    """Return the cells of a head count as Markdown: `ours` beside every other that was timed."""
    timed = {
        path.stem.split("-", 1)[1]: json.loads(path.read_text())
        for path in sorted(folder.glob(f"{heads}-*.json"))
    }
    attention = timed.pop(ATTENTION, {"cells": {}})["cells"]
    peers = [name for name in timed if name != ours]
    columns = [
        f"{heads} heads: rows x context",
        ours,
        *peers,
        f"best other / {ours}",
        "of the least",
    ]
    lines = [*_places(timed), "", head_of([*columns, "attention's part"])]
    ratios: dict[str, list[float]] = {"medians": [], "leasts": []}
    heavy: dict[str, list[float]] = {"medians": [], "leasts": []}
    for cell in timed.get(ours, {"cells": {}})["cells"]:
        ms = {n: found["cells"][cell]["ms"] for n, found in timed.items() if cell in found["cells"]}
        part = median(attention[cell]["ms"]) / median(ms[ours]) if cell in attention else None
        shown = [_shown(ms[name]) if name in ms else "" for name in (ours, *peers)]
        of_cell = {}
        if len(ms) > 1:
            of_cell = {"medians": _ratio(ms, ours, median), "leasts": _ratio(ms, ours, min)}
        for word, ratio in of_cell.items():
            ratios[word].append(ratio)
            heavy[word] += [ratio] if part is not None and part > 0.5 else []
        numbers = [_number(of_cell.get(word), ".3f") for word in ratios]
        lines.append(row_of([cell, *shown, *numbers, _number(part, ".0%")]))
    told = ["ms per step, median (least to most).", *_summary("Ratios", ratios)]
    told += _summary("Where attention is over half of the step", heavy)
    return "\n".join([*lines, "", " ".join(told)]) + "\n"


def _places(timed: dict[str, Any]) -> list[str]:
    """Return on what was timed, and by which commands."""
    facts = [found["facts"] for found in timed.values()]
    places = dict.fromkeys(f"{_PLACE.format(**one)}, {one['layers']} layers." for one in facts)
    return [*places, *dict.fromkeys(f"`{one['command']}`" for one in facts)]


def _shown(ms: list[float]) -> str:
    return f"{median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(ms: dict[str, list[float]], ours: str, number: Callable[[list[float]], float]) -> float:
    """Return the best other's time over ours."""
    return min(number(found) for name, found in ms.items() if name != ours) / number(ms[ours])


def _summary(what: str, ratios: dict[str, list[float]]) -> list[str]:
    return [
        f"{what}, of {word}: geometric mean {geometric_mean(many):.3f}, least {min(many):.3f} "
        f"of {len(many)}."
        for word, many in ratios.items()
        if many
    ]
