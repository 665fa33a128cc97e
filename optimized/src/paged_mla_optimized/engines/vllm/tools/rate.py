"""Time decode steps of vLLM with this backend and with vLLM's own; run no other work meanwhile.

    python -m paged_mla_optimized.engines.vllm.tools.rate --heads 128 --backends CUSTOM FLASHMLA
    python -m paged_mla_optimized.engines.vllm.tools.rate --table

vLLM's ``DecodeBenchConnector`` fills the cache with random numbers, so that long contexts need no
prefill. A time is the mean of whole engine steps in a window, with full CUDA graphs, bf16 and
blocks of 64. The engine's core runs in its own process, as by default. Each round creates an engine
of every backend; with ``--together`` all engines run at once. After all cells are timed, vLLM's own
profiler runs on the last engine of each backend. Cells are written to
``FOLDER/HEADS-BACKEND.json`` as they are timed; ``--table`` prints all cells there as Markdown.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.tools.cells import (
    ENOUGH_SECONDS,
    LEAST_STEPS,
    PROFILED_STEPS,
    Command,
    most_cache_bytes,
    token_bytes,
)
from paged_mla_optimized.engines.tools.model import VOCAB
from paged_mla_optimized.engines.tools.side_by_side import Cell, Timer
from paged_mla_optimized.engines.tools.trace import busy_ms_of_step
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

COMMAND = Command(
    engine="vllm",
    tool="rate",
    step="step",
    ours=NAME,
    peers=("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"),
    rows=(1, 8, 64, 256),
    contexts=(1024, 8192, 32768),
    rounds=3,
    repeats=1,
    switches=(BATCH_INVARIANT,),
)
_WARM_STEPS, _MOST_STEPS = 6, 160
_BLOCK = 64
_ROOM = 12 * _BLOCK  # cache tokens of a row for the tokens that it generates in all windows
_CELL_SECONDS = 3.0  # few cells take longer
_FILL = {"fill_mean": 0.0, "fill_std": 0.5}


def run(
    model: Path, backend: str, options: argparse.Namespace, use: Callable[[Timer], None]
) -> None:
    """Create an engine, and call `use` with its timer.

    The cache fits the largest cell if the memory allows it.
    """
    give_cores_processes(options.at_once)
    longest = max(options.contexts) + _ROOM
    each = token_bytes(options.layers)
    asked_bytes = max(options.rows) * longest * each + (1 << 30)
    cache_bytes = min(asked_bytes, most_cache_bytes(options))
    traces = options.folder / f"traces-{backend}"
    given = arguments(
        model,
        backend,
        "full",
        sizes=sorted(options.rows),
        block_size=_BLOCK,
        max_model_len=longest,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=2048,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=cache_bytes,
        gpu_memory_utilization=0.9 / options.at_once,
        kv_transfer_config={
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": _FILL,
        },
        profiler_config=profiler(traces),
    )
    run_engine(given, lambda llm: use(_Timer(llm, cache_bytes // each, traces)))


class _Timer:
    def __init__(self, llm: Any, tokens: int, traces: Path) -> None:
        self.llm, self.tokens, self.traces = llm, tokens, traces

    def seconds(self, cell: Cell) -> float:
        """Return the expected seconds of a cell; infinity if the cell does not fit the cache.

        The time is the same for each cell that fits, because nothing is prefilled.
        """
        return _CELL_SECONDS if cell.rows * (cell.context + _ROOM) <= self.tokens else math.inf

    def step_ms(self, cell: Cell, repeats: int) -> list[float]:
        """Return the milliseconds of a step in each of `repeats` consecutive windows."""
        with self._rows(cell) as step:
            return [window_ms(step, cell.rows) for _ in range(repeats)]

    def busy_ms(self, cell: Cell) -> float:
        """Return the milliseconds of a step in which the GPU is busy."""
        with self._rows(cell) as step:
            tokens = PROFILED_STEPS * cell.rows
            events = traced(self.llm, self.traces, lambda: _take(step, tokens))
        return busy_ms_of_step(events)

    @contextmanager
    def _rows(self, cell: Cell) -> Iterator[Callable[[], Any]]:
        """Start the rows of a cell, yield the function that runs one step, and abort the rows.

        Before the yield it runs warm-up steps, the first of which fills the cache.
        """
        core = self.llm.llm_engine
        prompt = [(31 * i) % (VOCAB - 2) + 2 for i in range(cell.context)]
        names = hold(self.llm, [prompt] * cell.rows, _ROOM)
        release(self.llm)
        _take(core.step, _WARM_STEPS * cell.rows)
        yield core.step
        core.abort_request(names, internal=True)


def _take(step: Callable[[], Any], tokens: int) -> None:
    while tokens > 0:
        tokens -= len(step())


def window_ms(step: Callable[[], Any], rows: int) -> float:
    """Return the mean milliseconds of a step with `rows` rows.

    `step` runs one step and returns its outputs, one for each row.
    """
    tokens, start, elapsed = 0, time.perf_counter(), 0.0
    while tokens < _MOST_STEPS * rows and (tokens < LEAST_STEPS * rows or elapsed < ENOUGH_SECONDS):
        tokens += len(step())
        elapsed = time.perf_counter() - start
    return 1e3 * elapsed / (tokens / rows)


if __name__ == "__main__":
    sys.exit(COMMAND.main(__doc__, run))
