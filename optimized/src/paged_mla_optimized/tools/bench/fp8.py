"""Time decode over flat FP8 caches, over equal bfloat16 caches, and FlashMLA's FP8 decode.

``python -m paged_mla_optimized.tools.bench.fp8 [--only REGEX] [--peers DIR] [--out STEM]`` needs a
GPU. It times exact and fast products, after a check against float32. The times of attention include
its combine launch and, for fast products, the launch that quantizes queries. FlashMLA gets queries
that are quantized before the timing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tools.bench import peers
from paged_mla_optimized.tools.bench.cases import FP8, Case
from paged_mla_optimized.tools.bench.problem import ROUNDED_LIMIT, Tensors, attention, build, error
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import alone, in_turns

CACHE_SCALE = 2.0**-6  # a power of two, so that bfloat16 represents the values of the FP8 cache
KINDS = ("exact", "fast", "bf16", "flashmla")


def quantized(tensors: Tensors) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Return the case with the values of an FP8 cache, the codes of that cache, and its scale."""
    codes = (tensors.cache.float() / CACHE_SCALE).to(torch.float8_e4m3fn)
    held = (codes.float() * CACHE_SCALE).to(tensors.cache.dtype)
    scale = torch.tensor(CACHE_SCALE, device=codes.device)
    return replace(tensors, cache=held), codes, scale


def measure(case: Case, flashmla: Any) -> dict[str, Any]:
    """Return the errors of each kind, and its times in microseconds, alone and interleaved.

    `flashmla` returns a launch, or ``None`` for a case that it cannot run.

    Raises
    ------
    ArithmeticError
        An error is NaN or above its limit.
    """
    tensors, codes, scale = quantized(build(case))
    flat = LatentCache("fp8_e4m3", codes, scale)
    config = replace(tensors.config, cache_format="fp8_e4m3")
    launches = {
        "exact": attention(tensors, config, flat),
        "fast": attention(tensors, replace(config, products="fast"), flat),
        "bf16": attention(tensors, tensors.config, tensors.cache),
        "flashmla": flashmla(tensors, codes, scale),
    }
    launches = {kind: launch for kind, launch in launches.items() if launch is not None}
    shape = (*tensors.q.shape[:3], -1)
    exact = {"exact", "bf16"}
    errors = {
        kind: error(tensors, launch().view(shape), *() if kind in exact else (ROUNDED_LIMIT,))
        for kind, launch in launches.items()
    }
    return {
        "case": case.name,
        "errors": errors,
        "alone": alone(launches),
        "in_turns": in_turns(launches),
    }


def header() -> str:
    """Return the head of the Markdown table."""
    columns = ["case"]
    for how in ("", ", interleaved"):
        columns += [f"{kind} us{how}" for kind in KINDS]
        columns += [f"FlashMLA / {kind}{how}" for kind in ("exact", "fast")]
    columns += [f"error, {kind}" for kind in KINDS]
    return head_of(columns)


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    cells = [row["case"]]
    for times in (row["alone"], row["in_turns"]):
        cells += [f"{times[kind]:.1f}" if kind in times else "-" for kind in KINDS]
        theirs = times.get("flashmla")
        cells += [f"{theirs / times[kind]:.2f}" if theirs else "-" for kind in ("exact", "fast")]
    cells += [f"{row['errors'][kind]:.1e}" if kind in row["errors"] else "-" for kind in KINDS]
    return row_of(cells)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.fp8")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder of FlashMLA")
    options = options_of(parser, FP8)
    flashmla = peers.load_flashmla_fp8(options.peers)
    run(FP8, partial(measure, flashmla=flashmla), line, header(), options)


if __name__ == "__main__":
    main()
