"""Time decode steps of SGLang with this backend and with its own; run no other work meanwhile.

    python -m paged_mla_optimized.engines.sglang.tools.rate --heads 128 --backends paged_mla fa3
    python -m paged_mla_optimized.engines.sglang.tools.rate --together --rounds 3 --repeats 1
    python -m paged_mla_optimized.engines.sglang.tools.rate --table

The prompt of a row is cached once; prompts of shorter contexts are prefixes of it. The rows then
generate, and the engine reports progress every few tokens. The time between two reports is a window
of whole engine steps, with their work on the host. The engines use CUDA graphs, bf16 and pages of
64. SGLang's default backend runs the prefill for SGLang's own backends. After all cells are timed,
SGLang's profiler runs. Cells are written to ``FOLDER/HEADS-BACKEND.json`` as they are timed;
``--table`` prints all cells there as Markdown.
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
    rounds=1,  # the creation of an engine takes long
    repeats=3,
)
_MOST_STEPS = 48  # of a window, whose ends are reports of another process
_LEADS = (32, 96, 224)  # tokens by which the first row may be ahead of the last
_PAGE = 64
_ROOM = 8 * _PAGE  # pool tokens of a row for the tokens that it generates
_FIXED_SECONDS = 2.0  # expected time of a cell whose prompts are cached


def run(
    model: Path, backend: str, options: argparse.Namespace, use: Callable[[Timer], None]
) -> None:
    """Create an engine, and call `use` with its timer.

    The cache fits the largest cell if the memory allows it.
    """
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
        custom_sigquit_handler=survive,  # this process then runs other backends
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
        self.cached: dict[int, int] = defaultdict(int)  # row -> number of cached tokens
        self.rate = math.inf  # multiplications of the prompts' attention in a second
        for context in sorted({min(options.contexts), max(options.contexts)}):  # the first compiles
            one, start = Cell(1, context), time.monotonic()
            asked = self._prefill(one)
            self._cache(one)
            self.rate = asked / (time.monotonic() - start)

    def seconds(self, cell: Cell) -> float:
        """Return the expected seconds of a cell, with the prefill of prompts that are not cached.

        The result is infinity if the cell does not fit the cache.
        """
        if cell.rows * (cell.context + _ROOM) > self.tokens:
            return math.inf
        return _FIXED_SECONDS + self._prefill(cell) / self.rate

    def step_ms(self, cell: Cell, repeats: int) -> list[float]:
        """Return the milliseconds of a step in each of `repeats` consecutive windows."""
        start, asked = time.monotonic(), self._prefill(cell)
        self._cache(cell)
        if asked and cell.rows > 1:
            self.rate = asked / (time.monotonic() - start)
        [trial] = self._windows(cell, LEAST_STEPS, 1)
        steps = min(max(round(1e3 * ENOUGH_SECONDS / trial), LEAST_STEPS), _MOST_STEPS)
        return self._windows(cell, steps, repeats)

    def busy_ms(self, cell: Cell) -> float:
        """Return the milliseconds of a step in which the GPU is busy.

        Raises
        ------
        RuntimeError
            A row finished before enough steps with all rows were profiled.
        """
        self._cache(cell)
        for lead in _LEADS:
            has_all = self._profile(cell, 3 * PROFILED_STEPS + lead)
            events = take(self.traces)
            if has_all:
                return busy_ms_of_step(events)
        raise RuntimeError(
            f"{cell}: a row finished before enough steps with all rows were profiled"
        )

    def _profile(self, cell: Cell, tokens: int) -> bool:
        """Profile steps in which all rows generate; return whether no row finished before the end.

        Each row generates `tokens` tokens.
        """
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
                    num_steps=PROFILED_STEPS,  # the profiler stops itself after them
                    activities=["GPU"],
                    with_stack=False,
                    record_shapes=False,
                )
            # The profile started some steps after this row, and it has ended by now.
            if row == last and told[row] == 1 + 2 * PROFILED_STEPS:
                has_all = max(told) < tokens
        return has_all

    def _prefill(self, cell: Cell) -> float:
        """Return the number of attention multiplications for the uncached part of the prompts."""
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
        raise RuntimeError(f"{cell}: a row finished before all windows with all rows were timed")


def prompts_by_default(backend: str) -> dict[str, str]:
    """Return arguments with which SGLang's default backend runs the prefill of its own backends.

    The command times only decode steps.
    """
    return {} if backend == NAME else decode_rows_of(backend)


def prompts_of(cell: Cell) -> list[list[int]]:
    """Return a prompt for each row. The prompt of a shorter context is a prefix of a longer one."""
    tokens = [(31 * i) % (VOCAB - 2) + 2 for i in range(cell.context)]
    return [[row + 2, *tokens[1:]] for row in range(cell.rows)]


def moments(
    engine: Any, prompts: list[list[int]], steps: int, tokens: int
) -> list[dict[int, float]]:
    """Return for each row the time at which it reported each number of tokens.

    A row reports its first token, and then every `steps` tokens, until it has `tokens` tokens.
    """
    told: list[dict[int, float]] = [{} for _ in prompts]
    way = _way(tokens) | {"stream_interval": steps}
    for chunk in engine.generate(input_ids=prompts, sampling_params=way, stream=True):
        told[chunk["index"]][chunk["meta_info"]["completion_tokens"]] = time.perf_counter()
    return told


def windows_ms(told: list[dict[int, float]], steps: int, count: int) -> list[float]:
    """Return the milliseconds of a step in `count` windows in which all rows generate.

    From the start of the last row on, all rows generate. The first `steps` steps of this row are
    not timed. The result is empty if another row finished before the last window, or if the engine
    merged two reports into one.

    Parameters
    ----------
    told : list of dict
        For each row the time of each reported number of tokens, as :func:`moments` returns it.
    steps : int
        The number of steps in a window.
    count : int
        The number of windows.
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
