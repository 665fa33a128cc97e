"""Time chunked prefill of vLLM with its own prefill attention and with this package's.

    python -m paged_mla_optimized.engines.vllm.tools.prefill --heads 128
    python -m paged_mla_optimized.engines.vllm.tools.prefill --table

Prompts of random tokens start together without a prefix cache. vLLM processes them in chunks of
8192 tokens, so that later chunks have contexts. A time covers all prompts, in whole engine steps;
run no other work on the machine meanwhile. No row decodes, because each prompt generates one token.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.tools.cells import Command
from paged_mla_optimized.engines.tools.model import VOCAB
from paged_mla_optimized.engines.tools.side_by_side import Cell, Timer
from paged_mla_optimized.engines.tools.trace import busy_ms
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import (
    BATCH_INVARIANT,
    arguments,
    give_cores_processes,
    hold,
    profiler,
    release,
    run_engine,
    traced,
)

_WAYS: dict[str, dict[str, Any]] = {
    "ours": {"attention_config": {"mla_prefill_backend": NAME}},
    "vllm": {},
}
COMMAND = Command(
    engine="vllm",
    tool="prefill",
    step="all prompts",
    ours="ours",
    peers=("vllm",),
    rows=(2, 16, 64),
    contexts=(1024, 4096, 32768),
    rounds=2,
    repeats=2,
    switches=(BATCH_INVARIANT,),
)
_CHUNK, _MOST_TOKENS = 8192, 65536
_CELL_SECONDS = 4.0  # few loads take longer


def run(model: Path, way: str, options: argparse.Namespace, use: Callable[[Timer], None]) -> None:
    """Create an engine whose cache fits every load, and pass its timer to `use`."""
    give_cores_processes(options.at_once)
    traces = options.folder / f"traces-{way}"
    given = arguments(
        model,
        NAME,
        "full",
        sizes=sorted(options.rows),
        block_size=64,
        max_model_len=max(options.contexts) + 64,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=_CHUNK,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=8 << 30,
        gpu_memory_utilization=0.5,
        profiler_config=profiler(traces),
        **_WAYS[way],
    )
    run_engine(given, lambda llm: use(_Timer(llm, traces)))


class _Timer:
    def __init__(self, llm: Any, traces: Path) -> None:
        self.llm, self.traces = llm, traces

    def seconds(self, cell: Cell) -> float:
        """Return one estimate for loads of up to ``_MOST_TOKENS`` tokens, else infinity."""
        return _CELL_SECONDS if cell.rows * cell.context <= _MOST_TOKENS else math.inf

    def step_ms(self, cell: Cell, repeats: int) -> list[float]:
        """Return the milliseconds of all prompts, `repeats` times, after one run that compiles."""
        self._prefill_ms(cell)
        return [self._prefill_ms(cell) for _ in range(repeats)]

    def busy_ms(self, cell: Cell) -> float:
        """Return the milliseconds in which the GPU is busy with all prompts."""
        return busy_ms(traced(self.llm, self.traces, lambda: self._prefill_ms(cell)))

    def _prefill_ms(self, cell: Cell) -> float:
        rng = random.Random(0)
        prompts = [rng.choices(range(2, VOCAB), k=cell.context) for _ in range(cell.rows)]
        hold(self.llm, prompts, 1)
        core, start = self.llm.llm_engine, time.perf_counter()
        release(self.llm)
        while core.has_unfinished_requests():
            core.step()
        return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(COMMAND.main(__doc__, run))
