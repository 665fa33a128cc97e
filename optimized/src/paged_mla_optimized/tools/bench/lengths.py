"""Measure the errors of decode by the number of keys, also of other projects' kernels.

``python -m paged_mla_optimized.tools.bench.lengths [--only REGEX] [--peers DIR] [--before JSON]
[--out STEM]`` needs a GPU. The other kernels are FlashMLA, FlashAttention 3 and FlashInfer.
``--before`` takes a file that this command wrote at an earlier commit, whose errors become a
column.

Queries, latents and rotated keys are drawn from N(0, 1) and rounded to bfloat16. Each output is
compared with float64 over the values in its cache. FP8 caches have one scale, the smallest with
which no value saturates. This package's products over them are exact. FlashMLA's FP8 decode rounds
queries and weights to e4m3. The other kernels do not support FP8 caches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.tools.bench import peers
from paged_mla_optimized.tools.bench.accuracy import attend
from paged_mla_optimized.tools.bench.cases import Case
from paged_mla_optimized.tools.bench.formats import cache_of
from paged_mla_optimized.tools.bench.formatted import FLAT, held
from paged_mla_optimized.tools.bench.problem import Tensors, attention, build
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run

ROWS = 16  # with 16 heads, the smallest number, the output has 131,072 elements
KEYS = (1, 2, 4, 16, 64, 1024, 8192)
OURS, BEFORE = "paged-mla", "paged-mla, before"
PEERS = {"FlashMLA": "flashmla", "FA3": "fa3", "FlashInfer": "flashinfer"}
COLUMNS = (OURS, BEFORE, *PEERS)
MANTISSA_BITS = 8  # bfloat16, with its implicit bit


class Step(NamedTuple):
    """One row of the table."""

    num_heads: int
    cache_format: str
    keys: int

    @property
    def name(self) -> str:
        """The first cell."""
        return f"h{self.num_heads}, {self.cache_format}, {self.keys} keys"


STEPS = [
    Step(heads, cache_format, keys)
    for cache_format in ("bf16", FLAT)
    for heads in (16, 128)
    for keys in KEYS
]


class Errors(NamedTuple):
    """The errors of outputs [N, H, R] compared with float64.

    Parameters
    ----------
    rms, largest : float
        The root mean square of the errors and the largest error, both divided by the root mean
        square of the correct outputs.
    differing : float
        The fraction of elements that differ from the float64 output rounded to bfloat16.
    """

    rms: float
    largest: float
    differing: float


def measure(
    step: Step, plain: Mapping[str, Any], flashmla_fp8: Any, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the errors of each kernel that can run a step, by its column in the table."""
    tensors = inputs(step)
    config = replace(tensors.config, cache_format=step.cache_format)
    cache = cache_of(tensors, config)
    launches = {OURS: attention(tensors, config, cache)}
    if step.cache_format == FLAT:
        launches["FlashMLA"] = flashmla_fp8(tensors, cache.latents, cache.scales)
    else:
        launches |= {column: builder(tensors) for column, builder in plain.items()}
    want = attend(tensors, held(cache))
    shape = want.shape
    found = {
        column: errors(launch().reshape(shape), want)
        for column, launch in launches.items()
        if launch is not None
    }
    if step.name in before:
        found[BEFORE] = Errors(*before[step.name])
    return {"step": step.name, "errors": found}


def inputs(step: Step, device: str = "cuda") -> Tensors:
    """Return a case with one query per row and values from N(0, 1)."""
    drawn = build(Case(step.name, step.num_heads, 1, (step.keys,) * ROWS), device)  # N(0, 1 / 4)
    return replace(
        drawn,
        q=2 * drawn.q,
        cache=2 * drawn.cache,
        q_nope=2 * drawn.q_nope,
        q_pe=2 * drawn.q_pe,
    )


def errors(found: torch.Tensor, want: torch.Tensor) -> Errors:
    """Return the errors of outputs in bfloat16."""
    difference, size = found.double() - want, want.square().mean().sqrt()
    differing = found.double().cpu().numpy() != rounded(want.cpu().numpy())
    return Errors(
        rms=float(difference.square().mean().sqrt() / size),
        largest=float(difference.abs().max() / size),
        differing=float(differing.mean()),
    )


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest bfloat16 numbers of values that are not subnormal in bfloat16.

    torch rounds float64 to float32 first, which can move a value to the middle between two numbers.
    """
    mantissa, exponent = np.frexp(values)
    near: NDArray[np.float64] = np.rint(mantissa * 2**MANTISSA_BITS)
    return np.asarray(np.ldexp(near, exponent - MANTISSA_BITS))


def errors_before(path: Path | None) -> dict[str, list[float]]:
    """Return the errors of this project's kernels by step, from a file that this command wrote.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError
        The file cannot be read, or this command did not write it.
    """
    if path is None:
        return {}
    return {row["step"]: row["errors"][OURS] for row in json.loads(path.read_text())["rows"]}


def header() -> str:
    """Return the head of the Markdown table."""
    kinds = "root mean square / largest / differing"
    return head_of(["heads, format, keys", *(f"{column}: {kinds}" for column in COLUMNS)])


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    found = row["errors"]
    return row_of([row["step"], *(_cell(found.get(column)) for column in COLUMNS)])


def _cell(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    rms, largest, differing = found
    return f"{rms:.2e} / {largest:.1e} / {differing:.2%}"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.lengths")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder of other kernels")
    parser.add_argument(
        "--before", type=Path, metavar="JSON", help="the JSON file of an earlier commit"
    )
    options = options_of(parser, STEPS)
    try:
        before = errors_before(options.before)
    except (OSError, ValueError, KeyError, TypeError):
        allowed = "a JSON file that this command wrote"
        parser.error(f"--before: got {options.before}; allowed: {allowed}")
    found = peers.load(options.peers)
    plain = {column: found[name] for column, name in PEERS.items() if name in found}
    fp8 = peers.load_flashmla_fp8(options.peers)
    measured = partial(measure, plain=plain, flashmla_fp8=fp8, before=before)
    run(STEPS, measured, line, header(), options)


if __name__ == "__main__":
    main()
