"""Draw the pictures of an explanation into one PNG file, for users without a browser.

This module needs matplotlib, which the extra ``pictures`` installs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paged_mla_reference.explain.explanation import Explanation
from paged_mla_reference.explain.render.maps import Maps
from paged_mla_shared.errors import InvalidArgument

_WIDE = 64  # blocks in a line


def draw(explanation: Explanation, maps: Maps, path: Path) -> None:
    """Write the picture to `path`.

    Raises
    ------
    InvalidArgument
        Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        allowed = "pip install 'paged-mla[pictures]', or --html"
        raise InvalidArgument("--png", "an installation without matplotlib", allowed) from error
    figure: Any = Figure(figsize=(13, 12), layout="constrained")
    title = "\n".join(textwrap.wrap(f"{explanation.verdict} {explanation.cause}", 130)[:5])
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    (heads, blocks), (ulps, mask), (owners, rest) = figure.subplots(3, 2)
    errors = [[math.log2(max(share, 2**-6)) for share in line] for line in maps.by_head]
    title = "log2 of errors relative to their budgets: rows by heads"
    _matrix(figure, heads, errors, title, ("RdYlGn_r", -6, 6))
    title = "relative distance of wrong queries from the right output without these keys"
    _matrix(figure, blocks, maps.by_block, title, ("Blues_r", 0, 1))
    _histogram(ulps, maps)
    title = f"mask of row {maps.mask_row}: queries by keys; 2 is a wrong query"
    _matrix(figure, mask, maps.mask, title, ("Blues", 0, 2))
    rows_of = [3 * (entry[2] > 0) or min(entry[1], 2) for entry in maps.owners]
    lines = [rows_of[i : i + _WIDE] for i in range(0, len(rows_of), _WIDE)]
    title = "blocks in use by id: 1 used by one row, 2 by several, 3 by a wrong row"
    _matrix(figure, owners, lines, title, ("Purples", 0, 3))
    rest.set_axis_off()
    figure.savefig(path, dpi=90)


def _matrix(
    figure: Any,
    axes: Any,
    lines: Sequence[Sequence[float]],
    title: str,
    colours: tuple[str, float, float],
) -> None:
    """Draw a matrix; `colours` is a colormap, and the values of its first and last color."""
    axes.set_title(title, fontsize=9)
    if not lines:
        axes.set_axis_off()
        return
    cells = np.full((len(lines), max(map(len, lines))), np.nan)
    for y, line in enumerate(lines):
        cells[y, : len(line)] = line
    name, low, high = colours
    image = axes.imshow(
        cells, aspect="auto", interpolation="nearest", cmap=name, vmin=low, vmax=high
    )
    figure.colorbar(image, ax=axes)


def _histogram(axes: Any, maps: Maps) -> None:
    axes.set_title("errors of out, in units in the last place", fontsize=9)
    if not maps.ulps:
        axes.set_axis_off()
        return
    places = np.arange(len(maps.ulps))
    axes.bar(places, maps.ulps, width=1.0, log=True)
    axes.set_xticks(places[::10], [f"{edge:.3g}" for edge in maps.ulp_edges[:-1][::10]], fontsize=8)
