"""The pictures of an explanation as one PNG, for who has a terminal alone.

Needs matplotlib, which the extra ``pictures`` installs.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from paged_mla_reference.debug.explanation import Explanation
from paged_mla_reference.debug.maps import Maps
from paged_mla_shared.errors import InvalidArgument


def draw(explanation: Explanation, maps: Maps, path: Path) -> None:
    """Write the picture.

    Raises
    ------
    InvalidArgument
        Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        allowed = "pip install 'paged-mla-reference[pictures]', or --html"
        raise InvalidArgument("--png", "no matplotlib", allowed) from error
    figure: Any = Figure(figsize=(13, 9), layout="constrained")
    title = "\n".join(textwrap.wrap(f"{explanation.verdict} {explanation.cause}", 130)[:5])
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    (heads, blocks), (ulps, mask) = figure.subplots(2, 2)
    _matrix(figure, heads, maps.by_head, "log2 of errors in budgets, rows by heads", "heads")
    _matrix(
        figure, blocks, maps.by_block, "without these keys, wrong queries by key blocks", "blocks"
    )
    _histogram(ulps, maps)
    _matrix(figure, mask, maps.mask, f"mask of row {maps.mask_row}", "keys")
    figure.savefig(path, dpi=90)


def _matrix(figure: Any, axes: Any, lines: list[list[Any]], title: str, across: str) -> None:
    axes.set_title(title, fontsize=9)
    if not lines:
        axes.set_axis_off()
        return
    cells = np.full((len(lines), max(map(len, lines))), np.nan)
    for y, line in enumerate(lines):
        cells[y, : len(line)] = line
    if "log2" in title:
        cells = np.log2(np.maximum(cells, 2**-6))
        image = axes.imshow(cells, aspect="auto", cmap="RdYlGn_r", vmin=-6, vmax=6)
    else:
        image = axes.imshow(cells, aspect="auto", cmap="Blues_r" if across == "blocks" else "Blues")
    figure.colorbar(image, ax=axes)
    axes.set_xlabel(across, fontsize=8)


def _histogram(axes: Any, maps: Maps) -> None:
    axes.set_title("errors of out, in units in the last place", fontsize=9)
    if not maps.ulps:
        axes.set_axis_off()
        return
    places = np.arange(len(maps.ulps))
    axes.bar(places, maps.ulps, width=1.0, log=True)
    axes.set_xticks(places[::10], [f"{edge:.3g}" for edge in maps.ulp_edges[:-1][::10]], fontsize=8)
