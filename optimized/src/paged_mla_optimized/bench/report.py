"""What a run of the benchmark leaves behind: JSON, a Markdown table, a roofline plot."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

_PEERS = ("flashmla", "fa3", "vllm_triton", "sglang_triton")


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    peers = " | ".join(f"{row[name]:.1f}" if name in row else "-" for name in _PEERS)
    ratios = [f"{row[name]:.2f}" if name in row else "-" for name in ("ratio", "ratio_in_turns")]
    return (
        f"| {row['case']} | {row['plan_us']:.1f} | {row['us']:.1f} | {row['main_us']:.1f} "
        f"| {row['portable_us']:.1f} | {row['tflops']:.0f} | {row['gbs']:.0f} "
        f"| {row['of_floor']:.2f} | {peers} | {' | '.join(ratios)} |"
    )


HEADER = (
    "| case | plan + attend us | attend us | main kernel us | portable us | TFLOP/s | GB/s "
    f"| floor / time | {' us | '.join(_PEERS)} us | best of FlashMLA and FA3 / attend "
    "| in turns |\n"
    f"|{'---|' * (10 + len(_PEERS))}"
)


def write(stem: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far as JSON and Markdown."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    ceiling = f"Copy {facts['copy_gbs']:.0f} GB/s, product {facts['matmul_tflops']:.0f} TFLOP/s."
    made = f"Commit {facts['commit']}, {facts['date']}."
    text = [
        f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}. {made} {ceiling}"
    ]
    text += ["", HEADER, *map(line, rows), "", summary(rows)]
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")


def plot(stem: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a roofline plot, where matplotlib is."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    plt: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(9, 6))
    bound = [10 ** (power / 20) for power in range(52)]
    roof = [min(x * facts["copy_gbs"] / 1e3, facts["matmul_tflops"]) for x in bound]
    axes.loglog(bound, roof, "k-", label="measured ceilings")
    for row in rows:
        axes.plot(row["intensity"], row["tflops"], "o")
        axes.annotate(row["case"], (row["intensity"], row["tflops"]), fontsize=6)
    axes.set_xlabel("FLOP / byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend()
    figure.savefig(stem.with_suffix(".png"), dpi=120)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the geometric means of the ratios."""
    compared = [row for row in rows if "ratio" in row]
    if not compared:
        return "no peer was there"
    alone = geometric_mean([row["ratio"] for row in compared])
    in_turns = geometric_mean([row["ratio_in_turns"] for row in compared])
    return f"geometric means over {len(compared)} cases: {alone:.3f} alone, {in_turns:.3f} in turns"
