"""Time this package's attention alone, at the cells that an engine timed.

    python -m paged_mla_optimized.engines.tools.attention FOLDER --heads 128

The times show which part of a step is attention. A cell is a number of rows and a context length.
The cells and the number of layers are read from ``FOLDER/HEADS-*.json``. The kernel runs in a CUDA
graph over the bf16 cache of one layer, with blocks of 64. Its time, multiplied by the number of
layers, is written to ``FOLDER/HEADS-attention.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from paged_mla_optimized.engines.tools.rates import ATTENTION
from paged_mla_optimized.runtime.device import device_record
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tools.bench.cases import Case
from paged_mla_optimized.tools.bench.problem import attention, build
from paged_mla_optimized.tools.bench.timing import in_turns

_BLOCK = 64


def main() -> int:
    """Time every cell that was timed in an engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=int, required=True)
    options = parser.parse_args()
    path = options.folder / f"{options.heads}-{ATTENTION}.json"
    paths = options.folder.glob(f"{options.heads}-*.json")
    timed = [json.loads(one.read_text()) for one in paths if one != path]
    if not any(found["cells"] for found in timed):
        parser.error(
            f"{options.folder} has no timed cells of {options.heads} heads; "
            "run engines.ENGINE.tools.rate with this --folder first"
        )
    layers, *others = sorted({found["facts"]["layers"] for found in timed})
    if others:
        parser.error(
            f"layers: got {', '.join(map(str, (layers, *others)))} in {options.folder}; "
            f"allowed: the same number in all files of {options.heads} heads"
        )
    found: dict[str, Any] = {}
    for cell in dict.fromkeys(cell for one in timed for cell in one["cells"]):
        rows, context = map(int, cell.split("x"))
        found[cell] = {"ms": [layers * _milliseconds(options.heads, rows, context)]}
        print(f"H {options.heads} attention {cell}: {found[cell]['ms'][0]:.3f} ms", flush=True)
    path.write_text(json.dumps({"facts": device_record(), "cells": found}, indent=1))
    return 0


def _milliseconds(heads: int, rows: int, context: int) -> float:
    """Return the milliseconds of the kernel for one layer."""
    tensors = build(Case(f"{rows}x{context}", heads, 1, (context,) * rows, _BLOCK))
    cache = LatentCache(tensors.config.cache_format, tensors.cache)
    launch = attention(tensors, tensors.config, cache)
    torch.cuda.synchronize()
    return in_turns({"": launch})[""] / 1e3


if __name__ == "__main__":
    sys.exit(main())
