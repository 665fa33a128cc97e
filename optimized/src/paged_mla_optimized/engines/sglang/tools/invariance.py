"""Generate with SGLang for prompts alone and in batches, and compare the logprobs bit for bit.

    python -m paged_mla_optimized.engines.sglang.tools.invariance [WORKLOAD ...] [--out STEM]

Every workload is an engine in its own processes, and all run at the same time: this backend and
SGLang's own backends with ``enable_deterministic_inference``, and this backend without it. There is
no prefix cache, and prompts of different lengths are processed whole. A line has, for each mix of
prompts, the number of prompts whose logprobs equal those of the prompt alone, and the lengths of
the other prompts. The exit status is 1 if a workload that is required to keep its bits did not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools.engine import arguments, ask, run_engine
from paged_mla_optimized.engines.tools.history import Ask
from paged_mla_optimized.engines.tools.invariance import MAX_LEN, MAX_TOKENS, ROWS, Command, Scene

_POOL = 131_072  # tokens; enough that no row is retracted

COMMAND = Command(
    engine="sglang",
    scenes={
        "ours": Scene(backend=NAME, is_promised=True),
        "ours-128": Scene(backend=NAME, heads=128, is_promised=True),
        "ours-fp8": Scene(backend=NAME, is_promised=True, arguments={"kv_cache_dtype": "fp8_e4m3"}),
        "ours-off": Scene(backend=NAME, is_on=False),
        "fa3": Scene(backend="fa3"),
        "triton": Scene(backend="triton"),
    },
)


def given(model: Path, scene: Scene) -> dict[str, Any]:
    """Return the arguments of a workload's engine."""
    return arguments(
        model,
        scene.backend,
        "graphs",
        enable_deterministic_inference=scene.is_on,
        page_size=64,
        context_length=MAX_LEN,
        max_running_requests=ROWS,
        cuda_graph_max_bs_decode=ROWS,
        disable_radix_cache=True,
        chunked_prefill_size=-1,
        max_prefill_tokens=MAX_TOKENS,
        max_total_tokens=_POOL,
        mem_fraction_static=0.6,  # the pool is smaller; other engines need memory too
        **scene.arguments,
    )


def run(model: Path, scene: Scene, use: Callable[[Ask], None]) -> None:
    """Create an engine, and pass a function that generates to `use`."""
    run_engine(given(model, scene), lambda engine: use(partial(ask, engine)))


if __name__ == "__main__":
    sys.exit(COMMAND.main(__doc__, run))
