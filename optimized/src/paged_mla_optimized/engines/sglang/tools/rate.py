"""Time decode steps of SGLang through this backend and through its own, alone on the machine.

    python -m paged_mla_optimized.engines.sglang.tools.rate --heads 128 --backends paged_mla fa3

Prompts are cached by a first call; then the same rows generate few tokens and many: the difference
is of whole engine steps, host work included. CUDA graphs, bf16, pages of 64. Cells go to
``FOLDER/HEADS-BACKEND.json`` as they are timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools.engine import arguments, run_engine
from paged_mla_optimized.engines.tools.model import VOCAB, build_model

PEERS = ("fa3", "flashmla", "triton")
_FEW, _MANY = 8, 72
_PAGE = 64


def main() -> int:
    """Time cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--backends", nargs="+", default=[NAME, *PEERS])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=250, help="then no further cell is begun")
    parser.add_argument("--folder", type=Path, default=Path("out/sglang-rate"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    model = build_model(options.folder, heads=options.heads, layers=options.layers)
    for backend in options.backends:
        try:
            _time_backend(model, backend, options, deadline)
        except Exception:  # the others are timed all the same
            print(f"{backend}: {traceback.format_exc()[-900:]}", flush=True)
    return 0


def _time_backend(model: Path, backend: str, options: argparse.Namespace, deadline: float) -> None:
    longest = max(options.contexts) + _MANY + _PAGE
    given = arguments(
        model,
        backend,
        "graphs",
        page_size=_PAGE,
        context_length=longest + _PAGE,
        max_running_requests=max(options.rows),
        cuda_graph_bs_decode=sorted(options.rows),
        chunked_prefill_size=8192,
        max_total_tokens=-(-max(options.rows) * (longest + _PAGE) // _PAGE) * _PAGE,
        mem_fraction_static=0.8,
    )
    cells: dict[str, list[float]] = {}

    def time_cells(engine: Any) -> None:
        for context in options.contexts:
            for rows in options.rows:
                if time.monotonic() > deadline:
                    print(f"{backend} {rows}x{context}: no time left", flush=True)
                    continue
                found = _step_ms(engine, rows, context, options.repeats)
                cells[f"{rows}x{context}"] = found
                path = options.folder / f"{options.heads}-{backend}.json"
                path.write_text(json.dumps(cells, indent=1))
                told = " ".join(f"{ms:.3f}" for ms in found)
                print(f"H {options.heads} {backend} {rows}x{context}: {told} ms", flush=True)

    run_engine(given, time_cells)


def _step_ms(engine: Any, rows: int, context: int, repeats: int) -> list[float]:
    """Return the milliseconds of a step of so many rows, once for each repeat."""
    prompts = [[(31 * i + row) % (VOCAB - 2) + 2 for i in range(context)] for row in range(rows)]

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        )
        return time.perf_counter() - start

    seconds(_FEW)  # caches the prompts
    return [1e3 * (seconds(_MANY) - seconds(_FEW)) / (_MANY - _FEW) for _ in range(repeats)]


if __name__ == "__main__":
    sys.exit(main())
