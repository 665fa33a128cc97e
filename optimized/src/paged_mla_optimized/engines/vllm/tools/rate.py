"""Time decode steps of vLLM through this backend and through its own, alone on the machine.

    python -m paged_mla_optimized.engines.vllm.tools.rate --heads 128 --backends CUSTOM FLASHMLA
    python -m paged_mla_optimized.engines.vllm.tools.rate --table

A cache is filled with random numbers by vLLM's own ``DecodeBenchConnector``, so that long contexts
need no prefill. Each cell is timed ``--repeats`` times over whole engine steps, host work included;
full CUDA graphs, bf16, blocks of 64. Cells go to ``FOLDER/HEADS-BACKEND.json`` as they are timed;
``--table`` prints all that lie there as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.tools.model import VOCAB, build_model
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import arguments, run_engine

PEERS = ("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
_WARM_STEPS = 6
_LEAST_STEPS, _MOST_STEPS, _ENOUGH_SECONDS = 8, 64, 0.7
_BLOCK = 64
_FILL = {"fill_mean": 0.0, "fill_std": 0.5}


def main() -> int:
    """Time cells, or print those that were timed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--backends", nargs="+", default=[NAME, *PEERS])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=265, help="then no further cell is begun")
    parser.add_argument("--folder", type=Path, default=Path("out/vllm-rate"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.table:
        for path in sorted({p.name.split("-")[0] for p in options.folder.glob("*.json")}):
            print(table(options.folder, path))
        return 0
    deadline = time.monotonic() + options.seconds
    model = build_model(options.folder, heads=options.heads, layers=options.layers)
    for backend in options.backends:
        try:
            _time_backend(model, backend, options, deadline)
        except Exception:  # the others are timed all the same
            print(f"{backend}: {traceback.format_exc()[-900:]}", flush=True)
    return 0


def _time_backend(model: Path, backend: str, options: argparse.Namespace, deadline: float) -> None:
    import torch

    free, _ = torch.cuda.mem_get_info()
    token_bytes = options.layers * 576 * 2
    wanted = max(options.rows) * (max(options.contexts) + 4 * _BLOCK) * token_bytes + (1 << 30)
    cache_bytes = min(wanted, int(0.7 * free))
    given = arguments(
        model,
        backend,
        "full",
        sizes=sorted(options.rows),
        block_size=_BLOCK,
        max_model_len=max(options.contexts) + 4 * _BLOCK,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=2048,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=cache_bytes,
        gpu_memory_utilization=0.9,
        kv_transfer_config={
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": _FILL,
        },
    )
    path = options.folder / f"{options.heads}-{backend}.json"
    cells: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    start = time.monotonic()

    def time_cells(llm: Any) -> None:
        print(f"{backend} made in {time.monotonic() - start:.0f} s", flush=True)
        for rows, context in itertools.product(options.rows, options.contexts):
            cell = f"{rows}x{context}"
            if rows * (context + 2 * _BLOCK) * token_bytes > cache_bytes:
                print(f"{backend} {cell}: no room", flush=True)
                continue
            if time.monotonic() > deadline:
                print(f"{backend} {cell}: no time left", flush=True)
                continue
            cells[cell] = [_step_ms(llm, rows, context) for _ in range(options.repeats)]
            path.write_text(json.dumps(cells, indent=1))
            told = " ".join(f"{ms:.3f}" for ms in cells[cell])
            print(f"H {options.heads} {backend} {cell}: {told} ms", flush=True)

    run_engine(given, time_cells)


def _step_ms(llm: Any, rows: int, context: int) -> float:
    """Return the milliseconds of a step of so many rows."""
    from vllm import SamplingParams

    core = llm.llm_engine
    way = SamplingParams(temperature=0, max_tokens=3 * _BLOCK, ignore_eos=True, detokenize=False)
    prompt = [(31 * i) % (VOCAB - 2) + 2 for i in range(context)]
    names = [
        core.add_request(uuid.uuid4().hex, {"prompt_token_ids": prompt}, way) for _ in range(rows)
    ]
    tokens = 0
    while tokens < _WARM_STEPS * rows:  # the first of them fills the cache
        tokens += len(core.step())
    tokens, start, elapsed = 0, time.perf_counter(), 0.0
    while tokens < _MOST_STEPS * rows and (
        tokens < _LEAST_STEPS * rows or elapsed < _ENOUGH_SECONDS
    ):
        tokens += len(core.step())
        elapsed = time.perf_counter() - start
    core.abort_request(names, internal=True)
    while core.has_unfinished_requests():
        core.step()
    return 1e3 * elapsed / (tokens / rows)


def table(folder: Path, heads: str) -> str:
    """Return the cells of a head count as Markdown."""
    found = {
        path.stem.split("-", 1)[1]: json.loads(path.read_text())
        for path in sorted(folder.glob(f"{heads}-*.json"))
    }
    peers = [name for name in found if name != NAME]
    lines = [
        f"| {heads} heads: rows x context | {' | '.join([NAME, *peers])} | best other / {NAME} |",
        "|---" * (len(peers) + 3) + "|",
    ]
    ratios = []
    for cell in found.get(NAME, {}):
        medians = {name: statistics.median(of[cell]) for name, of in found.items() if cell in of}
        shown = [
            f"{medians[name]:.3f} ({min(found[name][cell]):.3f} to {max(found[name][cell]):.3f})"
            if name in medians
            else ""
            for name in (NAME, *peers)
        ]
        others = [ms for name, ms in medians.items() if name != NAME]
        ratio = min(others) / medians[NAME] if others else math.nan
        ratios += [ratio] if others else []
        lines.append(f"| {cell} | {' | '.join(shown)} | {ratio:.3f} |")
    if ratios:
        lines.append(
            f"\nms per step, median of the repeats (least to most). Ratios: geometric mean "
            f"{statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
