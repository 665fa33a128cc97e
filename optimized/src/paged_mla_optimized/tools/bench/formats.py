"""Time decode over every FP8 cache format, compared with the flat format.

``python -m paged_mla_optimized.tools.bench.formats [--only REGEX] [--out STEM]`` needs a GPU. It
times exact and fast products over caches that ``append`` wrote, after a check against float32. The
times of attention include its combine launch and, for fast products, the launch that quantizes
queries.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tools.bench.cases import FORMATTED, Case
from paged_mla_optimized.tools.bench.formatted import FLAT, FP8_NAMES, held, written
from paged_mla_optimized.tools.bench.problem import ROUNDED_LIMIT, Tensors, attention, build, error
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import alone, in_turns
from paged_mla_shared.backend import PRODUCTS


def measure(case: Case) -> dict[str, Any]:
    """Return the times of each format and kind of products, alone and interleaved."""
    tensors = build(case)
    launches = {}
    for name in FP8_NAMES:
        config = replace(tensors.config, cache_format=name)
        cache = cache_of(tensors, config)
        exact = replace(tensors, cache=held(cache).to(tensors.cache.dtype))
        for products in PRODUCTS:
            launch = attention(tensors, replace(config, products=products), cache)
            shape = (*tensors.q.shape[:3], -1)
            error(exact, launch().view(shape), *() if products == "exact" else (ROUNDED_LIMIT,))
            launches[f"{name} {products}"] = launch
    return {
        "case": case.name,
        "alone": alone(launches),
        "in_turns": in_turns(launches),
    }


def cache_of(tensors: Tensors, config: MlaConfig) -> LatentCache:
    """Return a cache of a config's format into which ``append`` wrote the tokens of the case."""
    latents = tensors.cache.flatten(0, 1)
    slots = torch.arange(len(latents), device=latents.device)
    return written(config, latents, slots, len(tensors.cache))


def header() -> str:
    """Return the head of the Markdown table."""
    kinds = [f"{name} {products}" for products in PRODUCTS for name in FP8_NAMES]
    columns = ["case, us alone / interleaved, and ratio to flat", *kinds]
    return head_of(columns)


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    cells = [row["case"]]
    for products in PRODUCTS:
        for name in FP8_NAMES:
            ways = [(row[way][f"{name} {products}"], row[way][f"{FLAT} {products}"])
                    for way in ("alone", "in_turns")]  # fmt: skip
            times = " / ".join(f"{us:.1f}" for us, _ in ways)
            ratios = " / ".join(f"{us / flat:.2f}" for us, flat in ways)
            cells.append(times if name == FLAT else f"{times} ({ratios})")
    return row_of(cells)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.formats")
    options = options_of(parser, FORMATTED)
    run(FORMATTED, measure, line, header(), options)


if __name__ == "__main__":
    main()
