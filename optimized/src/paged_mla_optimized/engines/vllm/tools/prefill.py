"""Time chunked prefill of vLLM, with its own attention of prefill rows and with ours.

    python -m paged_mla_optimized.engines.vllm.tools.prefill --heads 128 --prompts 16x4096 2x32768

Prompts of random tokens, none cached, in chunks of ``--chunk``: the time of a prompt's later chunks
is that of contexts too. Whole engine steps, host work included; alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.tools.model import VOCAB, build_model
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import arguments, run_engine

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": (NAME, {"attention_config": {"mla_prefill_backend": NAME}}),
    "vllm": (NAME, {}),
    "FLASHMLA": ("FLASHMLA", {}),
    "FLASH_ATTN_MLA": ("FLASH_ATTN_MLA", {}),
}
"""Backend of decode rows and arguments of ``vllm.LLM``; "vllm" is our decode, its prefill."""


def main() -> int:
    """Time every load in every way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", nargs="+", default=["64x1024", "16x4096", "2x32768"])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("out/vllm-prefill"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    loads = [tuple(map(int, load.split("x"))) for load in options.prompts]
    model = build_model(options.folder, heads=options.heads, layers=options.layers)
    for way in options.ways:
        try:
            found = _time_way(model, way, loads, options)
        except Exception:  # the others are timed all the same
            print(f"{way}: {traceback.format_exc()[-900:]}", flush=True)
            continue
        path = options.folder / f"{options.heads}-{way}.json"
        path.write_text(json.dumps(found, indent=1))
    return 0


def _time_way(
    model: Path, way: str, loads: list[tuple[int, ...]], options: argparse.Namespace
) -> dict[str, list[float]]:
    backend, more = WAYS[way]
    longest = max(length for _, length in loads)
    given = arguments(
        model,
        backend,
        "full",
        sizes=[1, 8, 64],
        block_size=64,
        max_model_len=longest + 64,
        max_num_seqs=max(rows for rows, _ in loads),
        max_num_batched_tokens=options.chunk,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=8 << 30,
        gpu_memory_utilization=0.5,
        **more,
    )

    def time_loads(llm: Any) -> dict[str, list[float]]:
        found = {}
        for rows, length in loads:
            _seconds(llm, rows, length)  # kernels compile
            times = [_seconds(llm, rows, length) for _ in range(options.repeats)]
            rates = [rows * length / seconds for seconds in times]
            found[f"{rows}x{length}"] = rates
            told = " ".join(f"{rate:.0f}" for rate in rates)
            print(f"H {options.heads} {way} {rows}x{length}: {told} tokens/s", flush=True)
        return found

    return run_engine(given, time_loads)


def _seconds(llm: Any, rows: int, length: int) -> float:
    """Return how long so many prompts take, one generated token each."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(2, VOCAB) for _ in range(length)]} for _ in range(rows)
    ]
    way = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, way, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
