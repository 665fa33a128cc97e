"""The results of a run of the benchmark: JSON, a Markdown table and a roofline plot."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from paged_mla_optimized.tools.bench.table import head_of
from paged_mla_shared.folders import make_folders, with_ending

_MARKERS = "os^vD<>phP*X"


def line(row: dict[str, Any], peers: list[str]) -> str:
    """Return one row of the Markdown table."""
    theirs = [f"{row[name]:.1f}" if name in row else "-" for name in peers]
    ratios = [f"{row[name]:.2f}" if name in row else "-" for name in ("ratio", "ratio_in_turns")]
    return (
        f"| {row['case']} | {row['plan_us']:.1f} | {row['us']:.1f} | {row['main_us']:.1f} "
        f"| {row['portable_us']:.1f} | {row['tflops']:.0f} | {row['gbs']:.0f} "
        f"| {row['of_floor']:.2f} | {' | '.join(theirs + ratios)} |"
    )


def header(peers: list[str]) -> str:
    """Return the head of the Markdown table."""
    columns = ["case", "plan + attend us", "attend us", "main kernel us", "portable us"]
    columns += ["TFLOP/s", "GB/s", "floor / time", *(f"{name} us" for name in peers)]
    columns += ["best of FlashMLA and FA3 / attend", "the same, interleaved"]
    return head_of(columns)


def write(stem: Path, facts: dict[str, Any], rows: list[dict[str, Any]], peers: list[str]) -> None:
    """Write the rows that have been measured so far as JSON and Markdown."""
    make_folders(stem)
    with_ending(stem, ".json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    ceiling = f"Copy {facts['copy_gbs']:.0f} GB/s, product {facts['matmul_tflops']:.0f} TFLOP/s."
    made = f"Commit {facts['commit']}, {facts['date']}."
    text = [
        f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}. {made} {ceiling}"
    ]
    text += ["", header(peers), *(line(row, peers) for row in rows), "", summary(rows)]
    with_ending(stem, ".md").write_text("\n".join(text) + "\n")


def plot(stem: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a roofline plot of this package and of the better of FlashMLA and FA3.

    The function does nothing without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    plt: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    least = min(row["intensity"] for row in rows) / 1.3
    most = max(row["intensity"] for row in rows) * 1.3
    bound = [least * (most / least) ** (step / 99) for step in range(100)]
    roof = [min(x * facts["copy_gbs"] / 1e3, facts["matmul_tflops"]) for x in bound]
    axes.loglog(bound, roof, "k-", label="measured ceilings")
    for index, kind in enumerate(dict.fromkeys(map(_kind, rows))):
        chosen = [row for row in rows if _kind(row) == kind]
        compared = [row for row in chosen if "ratio" in row]
        look = {"linestyle": "", "marker": _MARKERS[index % len(_MARKERS)], "color": f"C{index}"}
        place = [row["intensity"] for row in chosen]
        axes.plot(place, [row["tflops"] for row in chosen], label=kind, **look)
        place = [row["intensity"] for row in compared]
        best = [row["tflops"] / row["ratio"] for row in compared]
        axes.plot(place, best, fillstyle="none", **look)
    axes.set_title(f"{facts['device']}: filled ours, hollow the better of FlashMLA and FA3")
    axes.set_xlabel("FLOP / byte")
    axes.set_ylabel("TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(title="heads, queries of a row", fontsize="small")
    figure.savefig(with_ending(stem, ".png"), dpi=120)


def _kind(row: dict[str, Any]) -> str:
    """Return the heads and queries of a case, which are the start of its name."""
    return " ".join(row["case"].split()[:2])


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the geometric means of the ratios."""
    compared = [row for row in rows if "ratio" in row]
    if not compared:
        return "no case was run with FlashMLA or FA3, so there are no ratios"
    alone = geometric_mean([row["ratio"] for row in compared])
    in_turns = geometric_mean([row["ratio_in_turns"] for row in compared])
    return (
        f"geometric means over {len(compared)} cases: {alone:.3f} alone, {in_turns:.3f} interleaved"
    )
