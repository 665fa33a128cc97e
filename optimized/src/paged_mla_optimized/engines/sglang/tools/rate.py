"""Time decode steps of SGLang through this backend and through its own, alone on the machine.

    python -m paged_mla_optimized.engines.sglang.tools.rate --heads 128 --backends paged_mla fa3
    python -m paged_mla_optimized.engines.sglang.tools.rate --together --rounds 3 --repeats 1
    python -m paged_mla_optimized.engines.sglang.tools.rate --table

The prompt of a row is cached once: those of shorter contexts begin it. Rows then generate, and tell
of every so many tokens: between two such moments lies a window of whole engine steps, host work
included. CUDA graphs, bf16, pages of 64; prompts of SGLang's backends are its default one's. Its
own profiler comes when all is timed. Cells go to ``FOLDER/HEADS-BACKEND.json`` as they are timed;
``--table`` prints all that lie there as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools.engine import (
    arguments,
    decode_rows_of,
    run_engine,
    survive,
)
from paged_mla_optimized.engines.tools.cells import (
    ENOUGH_SECONDS,
    LEAST_STEPS,
    PROFILED_STEPS,
    Command,
    most_cache_bytes,
    token_bytes,
)
from paged_mla_optimized.engines.tools.model import NOPE, ROPE, VALUE, VOCAB
from paged_mla_optimized.engines.tools.side_by_side import Cell, Timer
from paged_mla_optimized.engines.tools.trace import busy_ms_of_step, take

COMMAND = Command(
    engine="sglang",
    tool="rate",
    step="step",
    ours=NAME,
    peers=("fa3", "flashmla", "triton"),
    rows=(1, 8, 64),
    contexts=(1024, 8192, 32768),
    rounds=1,  # engines take long to make
    repeats=3,
)
_MOST_STEPS = 48  # more than in vLLM: moments are told across processes
_LEADS = (32, 96, 224)  # tokens by which the first row may be ahead of the last
_PAGE = 64
_ROOM = 8 * _PAGE  # of a row, for what it generates
_FIXED_SECONDS = 2.0  # of a cell whose prompts are cached


def run(
    model: Path, backend: str, options: argparse.Namespace, use: Callable[[Timer], None]
) -> None:
    """Make an engine whose cache holds the largest cell, or takes most of the memory."""
    longest = max(options.contexts) + _ROOM
    tokens = min(
        max(options.rows) * longest,
        most_cache_bytes(options) // token_bytes(options.layers),
    )
    given = arguments(
        model,
        backend,
        "graphs",
        page_size=_PAGE,
        context_length=longest,
        max_running_requests=max(options.rows),
        cuda_graph_bs_decode=sorted(options.rows),
        chunked_prefill_size=8192,
        max_total_tokens=tokens // _PAGE * _PAGE,
        mem_fraction_static=0.8,
        custom_sigquit_handler=survive,  # other backends follow in this process
        **prompts_by_default(backend),
    )

    traces = options.folder.absolute() / f"traces-{backend}"

    def time_cells(engine: Any) -> None:
        use(_Timer(engine, options, tokens // _PAGE * _PAGE, traces))

    run_engine(given, time_cells)


class _Timer:
    def __init__(self, engine: Any, options: argparse.Namespace, tokens: int, traces: Path) -> None:
        self.engine, self.tokens, self.traces = engine, tokens, traces
        self.products = options.layers * options.heads * 2 * (NOPE + ROPE + VALUE)
        self.cached: dict[int, int] = defaultdict(int)  # of each row, tokens
        self.rate = math.inf  # products of prompts' attention in a second
        for context in sorted({min(options.contexts), max(options.contexts)}):  # the first compiles
            one, start = Cell(1, context), time.monotonic()
            asked = self._prefill(one)
            self._cache(one)
            self.rate = asked / (time.monotonic() - start)

    def seconds(self, cell: Cell) -> float:
        """Return how long the prompts should take that are not cached, and the rest."""
        if cell.rows * (cell.context + _ROOM) > self.tokens:
            return math.inf
        return _FIXED_SECONDS + self._prefill(cell) / self.rate

    def step_ms(self, cell: Cell, repeats: int) -> list[float]:
        """Return the milliseconds of a step in each of some windows, one after the other."""
        start, asked = time.monotonic(), self._prefill(cell)
        self._cache(cell)
        if asked and cell.rows > 1:
            self.rate = asked / (time.monotonic() - start)
        [trial] = self._windows(cell, LEAST_STEPS, 1)
        steps = min(max(round(1e3 * ENOUGH_SECONDS / trial), LEAST_STEPS), _MOST_STEPS)
        return self._windows(cell, steps, repeats)

    def busy_ms(self, cell: Cell) -> float:
        """Return for how many milliseconds of a step the GPU is busy."""
        self._cache(cell)
        for lead in _LEADS:
            has_all = self._profile(cell, 3 * PROFILED_STEPS + lead)
            events = take(self.traces)
            if has_all:
                return busy_ms_of_step(events)
        raise RuntimeError(f"{cell}: a row was done before steps of all were profiled")

    def _profile(self, cell: Cell, tokens: int) -> bool:
        """Profile steps once all rows generate; return whether none was done before the end."""
        told = [0] * cell.rows
        last, has_all = -1, False
        way = _way(tokens) | {"stream_interval": PROFILED_STEPS}
        for chunk in self.engine.generate(
            input_ids=prompts_of(cell), sampling_params=way, stream=True
        ):
            row = chunk["index"]
            told[row] = chunk["meta_info"]["completion_tokens"]
            if last < 0 and all(told):
                last = row
                self.engine.start_profile(
                    output_dir=str(self.traces),
                    num_steps=PROFILED_STEPS,  # then it ends by itself
                    activities=["GPU"],
                    with_stack=False,
                    record_shapes=False,
                )
            # It began some steps after the row did, and has ended as many later.
            if row == last and told[row] == 1 + 2 * PROFILED_STEPS:
                has_all = max(told) < tokens
        return has_all

    def _prefill(self, cell: Cell) -> float:
        """Return the products of attention that the uncached rest of the prompts takes."""
        rest = [max(cell.context**2 - self.cached[row] ** 2, 0) for row in range(cell.rows)]
        return float(sum(rest) / 2 * self.products)

    def _cache(self, cell: Cell) -> None:
        if any(self.cached[row] < cell.context for row in range(cell.rows)):
            self.engine.generate(input_ids=prompts_of(cell), sampling_params=_way(1))
        for row in range(cell.rows):
            self.cached[row] = max(self.cached[row], cell.context)

    def _windows(self, cell: Cell, steps: int, count: int) -> list[float]:
        for lead in _LEADS:
            told = moments(self.engine, prompts_of(cell), steps, steps * (count + 1) + 1 + lead)
            if found := windows_ms(told, steps, count):
                return found
        raise RuntimeError(f"{cell}: a row was done before another had taken its steps")


def prompts_by_default(backend: str) -> dict[str, str]:
    """Return what gives others' prompts to SGLang's default on Hopper: only steps are timed."""
    return {} if backend == NAME else decode_rows_of(backend)


def prompts_of(cell: Cell) -> list[list[int]]:
    """Return a prompt for each row: those of longer contexts go on where shorter ones end."""
    tokens = [(31 * i) % (VOCAB - 2) + 2 for i in range(cell.context)]
    return [[row + 2, *tokens[1:]] for row in range(cell.rows)]


def moments(
    engine: Any, prompts: list[list[int]], steps: int, tokens: int
) -> list[dict[int, float]]:
    """Return for each row when it told of how many tokens: of 1, and of each `steps` more."""
    told: list[dict[int, float]] = [{} for _ in prompts]
    way = _way(tokens) | {"stream_interval": steps}
    for chunk in engine.generate(input_ids=prompts, sampling_params=way, stream=True):
        told[chunk["index"]][chunk["meta_info"]["completion_tokens"]] = time.perf_counter()
    return told


def windows_ms(told: list[dict[int, float]], steps: int, count: int) -> list[float]:
    """Return the milliseconds of a step in windows in which all rows generate, or nothing.

    The row that began last has all others beside it from then on. Its first `steps` are not timed;
    nothing is found if another row was done before its last, or two moments were told as one.
    """
    last = max(told, key=lambda row: min(row.values()))
    ends = [last.get(1 + n * steps, math.inf) for n in range(1, count + 2)]
    if math.inf in ends or any(max(row.values()) < ends[-1] for row in told):
        return []
    return [1e3 * (end - start) / steps for start, end in itertools.pairwise(ends)]


def _way(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


if __name__ == "__main__":
    sys.exit(COMMAND.main(__doc__, run))
