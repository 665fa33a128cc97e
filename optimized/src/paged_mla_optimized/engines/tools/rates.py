"""A table of the times that ``cells.py`` measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from paged_mla_optimized.tools.bench.table import head_of, row_of

ATTENTION = "attention"
"""The name, in place of a backend's, of the times of this package's kernel for all layers."""
_PLACE = "{engine}, {device}, torch {torch}, triton {triton}, commit {commit}, {date}"


_NUMBERS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "medians": ("ms", median),
    "leasts": ("ms", min),
    "busy": ("busy_ms", median),
}
"""The numbers of which the table has ratios: wall-clock times, and times with a busy GPU."""
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class _Load:
    """The times of one load.

    Parameters
    ----------
    cell : str
    times : dict
        For each backend the lists of times, by their unit.
    ratios : dict
        For each key of ``_NUMBERS`` the number of the fastest other backend divided by that of this
        package's backend.
    turns : tuple or None
        The median of the ratios in the same turn, and its confidence interval.
    part : float or None
        The fraction of a step that attention takes.
    """

    cell: str
    times: dict[str, dict[str, list[float]]]
    ratios: dict[str, float | None]
    turns: tuple[float, float, float] | None
    part: float | None

    def cells(self, names: list[str]) -> list[str]:
        """Return the cells of this load's line in the table, for the backends `names`."""
        shown = [_shown(self.times[name]) if name in self.times else "" for name in names]
        numbers = [_number(ratio, ".3f") for ratio in self.ratios.values()]
        turns = "{:.3f} ({:.3f} to {:.3f})".format(*self.turns) if self.turns else ""
        return [self.cell, *shown, *numbers, turns, _number(self.part, ".0%")]


def table(folder: Path, heads: int, ours: str, step: str) -> str:
    """Return the table of the cells with `heads` heads as Markdown.

    Parameters
    ----------
    folder : Path
        The folder of ``HEADS-BACKEND.json``.
    heads : int
    ours : str
        The name of this package's backend, which is compared with every other backend.
    step : str
        The work that a time is for.
    """
    timed = {
        path.stem.split("-", 1)[1]: json.loads(path.read_text())
        for path in sorted(folder.glob(f"{heads}-*.json"))
    }
    attention = timed.pop(ATTENTION, {"cells": {}})["cells"]
    names = [ours, *(name for name in timed if name != ours)]
    columns = [f"{heads} heads: rows x context", *names]
    columns += [f"best other / {ours}: {word}" for word in (*_NUMBERS, "turns")]
    cells = timed.get(ours, {"cells": {}})["cells"]
    loads = [_load(timed, cell, ours, attention.get(cell)) for cell in cells]
    heavy = [load for load in loads if load.part is not None and load.part > 0.5]
    lines = [*_places(timed), "", head_of([*columns, "attention's part"])]
    lines += [row_of(load.cells(names)) for load in loads]
    told = [f"ms per {step}: median (least to most), and the ms in which the GPU is busy."]
    if missing := [name for name, one in timed.items() if not one["cells"]]:
        told.append(f"Requested, but not timed: {', '.join(missing)}.")
    told += _summary("Ratios", loads)
    told += _summary("Ratios with attention over half of the step", heavy)
    told += _summary_of_turns(loads)
    return "\n".join([*lines, "", " ".join(told)]) + "\n"


def _load(timed: dict[str, Any], cell: str, ours: str, kernel: dict[str, Any] | None) -> _Load:
    """Return one load; `kernel` has the times of this package's kernel alone, if available."""
    times = {name: one["cells"][cell] for name, one in timed.items() if cell in one["cells"]}
    ratios = {word: _ratio(times, ours, *number) for word, number in _NUMBERS.items()}
    part = median(kernel["ms"]) / median(times[ours]["ms"]) if kernel else None
    return _Load(cell, times, ratios, _of_turns(timed, cell, ours), part)


def _places(timed: dict[str, Any]) -> list[str]:
    """Return lines with the engine, the device, the versions and the commands of the times."""
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
    """Return the fastest other backend's time divided by ours; ``None`` if one is missing."""
    times = {name: number(one[what]) for name, one in found.items() if what in one}
    mine = times.pop(ours, None)
    return min(times.values()) / mine if times and mine is not None else None


def _of_turns(timed: dict[str, Any], cell: str, ours: str) -> tuple[float, float, float] | None:
    """Return the median ratio of the fastest other backend's time to ours, and its interval.

    Each ratio is of times in the same turn. The result is ``None`` if the engines did not run with
    ``--together``, or if there are too few turns for an interval.
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
        # A backend that failed, or had no time left, lacks the later turns.
        if (ratios := [his / own for his, own in zip(times, mine, strict=False)])
        and (interval := interval_of_median(ratios))
    ]
    return min(found, default=None)


def _turns(ms: list[float], repeats: int) -> list[float]:
    """Return one time of each turn: the median of its windows, which are not independent."""
    return [median(ms[first : first + repeats]) for first in range(0, len(ms), repeats)]


def interval_of_median(values: list[float]) -> tuple[float, float] | None:
    """Return the narrowest confidence interval of the median, at 95 % or more, or ``None``.

    Both ends are values of the sample. The interval holds for every distribution, because each
    value is as often below the median as above it. It needs at least six values.
    """
    count, outside, cut = len(values), 0.0, 0
    while (outside := outside + 2 * comb(count, cut) / 2**count) <= 1 - _CONFIDENCE:
        cut += 1
    return (sorted(values)[cut - 1], sorted(values)[-cut]) if cut else None


def _summary(what: str, loads: list[_Load]) -> list[str]:
    told = []
    for word in _NUMBERS:
        many = [ratio for load in loads if (ratio := load.ratios[word]) is not None]
        if many:
            mean, least = geometric_mean(many), min(many)
            told.append(
                f"{what}, of {word}: geometric mean {mean:.3f}, least {least:.3f} of {len(many)}."
            )
    return told


def _summary_of_turns(loads: list[_Load]) -> list[str]:
    turns = [load.turns for load in loads if load.turns]
    if not turns:
        return []
    middles, _, highs = zip(*turns, strict=True)
    told = (
        f"Ratios of times in the same turn, their median and its confidence interval of "
        f"{_CONFIDENCE:.0%}: geometric mean {geometric_mean(middles):.3f}, least "
        f"{min(middles):.3f}, least upper end {min(highs):.3f} of {len(middles)}."
    )
    return [told]
