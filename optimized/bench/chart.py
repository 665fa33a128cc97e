"""Draw the speed of decode and prefill compared with the fastest peer, from reports of an H200.

    python optimized/bench/chart.py    # writes reports/speed-light.svg and reports/speed-dark.svg

A number is the time of the peer divided by ours, each timed alone: 2 means half the time. A bar is
the geometric mean over the steps of its label, and the thin line is the range of the ratios.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).parent / "reports"
SHAPE = re.compile(r"h(?P<heads>\d+)(?: q\d+ b(?P<rows>\d+))?")  # as in "h16 q1 b64 s8192"

WIDTH = 480  # of the picture; a phone shows it at three quarters of that
UNIT = 260  # the width of a bar as fast as the peer
HEADER, ROW, FOOT = 34, 42, 26


@dataclass(frozen=True)
class Theme:
    """Colours on a light or a dark page."""

    name: str
    text: str
    muted: str
    faster: str
    slower: str


THEMES = (
    Theme("light", text="#1f2328", muted="#59636e", faster="#0969da", slower="#bc4c00"),
    Theme("dark", text="#f0f6fc", muted="#9198a1", faster="#4493f8", slower="#f0883e"),
)


@dataclass(frozen=True)
class Bar:
    """Some steps, and for each the peer's time divided by ours."""

    label: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios."""
        return math.exp(sum(map(math.log, self.ratios)) / len(self.ratios))

    @property
    def least(self) -> float:
        """The ratio of the step in which the peer is closest, or ahead."""
        return min(self.ratios)

    @property
    def most(self) -> float:
        """The ratio of the step in which the peer is furthest behind."""
        return max(self.ratios)


@dataclass(frozen=True)
class Group:
    """Bars that are compared with the same peer."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Step:
    """One timed step."""

    heads: int
    rows: int
    ratio: float


def read_groups(reports: Path) -> list[Group]:
    """Return the groups of the picture, read from the reports in a folder."""
    decode = [_step(row, row["ratio"]) for row in _rows(reports / "h200.json")]
    fp8 = [row for row in _rows(reports / "fp8.json") if "flashmla" in row["alone"]]
    exact = [_step(row, _quotient(row, "flashmla", "exact")) for row in fp8]
    fast = [_step(row, _quotient(row, "flashmla", "fast")) for row in fp8]
    prefill = [
        _step(row, _quotient(row, "FA3", "with plan")) for row in _rows(reports / "prefill.json")
    ]
    return [
        Group(
            "Decode, 16-bit cache, compared with FlashMLA and FA3",
            (
                _bar(decode, lambda step: step.heads == 16 and step.rows <= 8),
                _bar(decode, lambda step: step.heads == 16 and step.rows > 8),
                _bar(decode, lambda step: step.heads in {32, 64}),
                _bar(decode, lambda step: step.heads == 128 and step.rows == 1),
                _bar(decode, lambda step: step.heads == 128 and step.rows > 1),
            ),
        ),
        Group(
            "Decode, FP8 cache, compared with FlashMLA",
            (
                _bar(exact, lambda step: step.heads <= 32, "16-bit products"),
                _bar(exact, lambda step: step.heads >= 64, "16-bit products"),
                _bar(fast, lambda step: step.heads <= 32, "FP8 products"),
                _bar(fast, lambda step: step.heads >= 64, "FP8 products"),
            ),
        ),
        Group("Prefill, compared with FA3", (_bar(prefill, lambda step: step.heads > 0),)),
    ]


def draw(groups: list[Group], theme: Theme) -> str:
    """Return the picture as SVG."""
    parts: list[str] = []
    y = 24
    for group in groups:
        parts.append(f'<text x="0" y="{y}" class="title">{group.title}</text>')
        top = y + 8
        for bar in group.bars:
            parts += _draw_bar(bar, y)
            y += ROW
        parts.append(f'<path d="M{UNIT} {top}V{y + 4}" class="peer"/>')
        y += HEADER
    y -= HEADER - FOOT
    foot = "1 = as fast as the peer; of two, as the faster"
    parts.append(f'<text x="{UNIT}" y="{y}" class="foot">{foot}</text>')
    size = f'width="{WIDTH}" height="{y + 8}" viewBox="0 0 {WIDTH} {y + 8}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>Speed on an H200, in multiples of the faster peer's: {_said(groups)}</title>",
            _style(theme),
            *parts,
            "</svg>\n",
        ]
    )


def _draw_bar(bar: Bar, y: int) -> list[str]:
    """Return a line of words, with the bar below it."""
    kind = "slower" if bar.mean < 1 else "faster"
    least, mean, most = (round(value * UNIT, 1) for value in (bar.least, bar.mean, bar.most))
    middle = y + 35
    spread = (
        [f'<path d="M{least} {middle}H{most}M{least} {middle - 4}v8M{most} {middle - 4}v8"/>']
        if len(bar.ratios) > 1
        else []
    )
    numbers = f'<tspan class="mean">{bar.mean:.2f}</tspan>{_range(bar)}'
    return [
        f'<text x="0" y="{y + 24}">{bar.label}</text>',
        f'<text x="{WIDTH}" y="{y + 24}" class="number">{numbers}</text>',
        f'<rect x="0" y="{middle - 5}" width="{mean}" height="10" class="{kind}"/>',
        *spread,
    ]


def _range(bar: Bar) -> str:
    return f" ({bar.least:.2f} to {bar.most:.2f})" if len(bar.ratios) > 1 else " (one step)"


def _said(groups: list[Group]) -> str:
    return "; ".join(
        f"{group.title}: " + ", ".join(f"{bar.label} {bar.mean:.2f}" for bar in group.bars)
        for group in groups
    )


def _style(theme: Theme) -> str:
    return f"""<style>
text {{ font: 15px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {theme.text} }}
.title, .mean {{ font-weight: 600 }}
.number {{ text-anchor: end }}
.foot {{ text-anchor: middle; fill: {theme.muted} }}
.faster {{ fill: {theme.faster} }}
.slower {{ fill: {theme.slower} }}
path {{ stroke: {theme.text}; stroke-width: 2; fill: none }}
.peer {{ stroke: {theme.muted}; stroke-dasharray: 3 3 }}
</style>"""


def _bar(steps: Iterable[Step], chosen: Callable[[Step], bool], detail: str = "") -> Bar:
    """Return the bar of the chosen steps, with their heads and a detail, or requests, as label."""
    some = [step for step in steps if chosen(step)]
    heads = f"{_span(step.heads for step in some)} heads"
    requests = _span(step.rows for step in some)
    if not detail and requests != "0":
        detail = f"{requests} request{'' if requests == '1' else 's'}"
    label = f"{heads}, {detail}" if detail else heads
    return Bar(label, tuple(step.ratio for step in some))


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    if len(found) == 1:
        return str(found[0])
    return f"{found[0]} {'and' if len(found) == 2 else 'to'} {found[-1]}"


def _step(row: dict[str, Any], ratio: float) -> Step:
    shape = SHAPE.match(row["case"])
    if shape is None:
        raise ValueError(f"case: got {row['case']!r}; allowed: names that begin as h16 does")
    return Step(int(shape["heads"]), int(shape["rows"] or 0), ratio)


def _quotient(row: dict[str, Any], peer: str, ours: str) -> float:
    return float(row["alone"][peer] / row["alone"][ours])


def _rows(report: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return rows


def main(folder: Path = REPORTS) -> None:
    """Write both pictures into a folder."""
    groups = read_groups(REPORTS)
    for theme in THEMES:
        (folder / f"speed-{theme.name}.svg").write_text(draw(groups, theme))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
