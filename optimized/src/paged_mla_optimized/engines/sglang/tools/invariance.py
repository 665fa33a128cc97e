"""Ask SGLang for prompts alone and among others, and compare logprobs bit for bit.

    python -m paged_mla_optimized.engines.sglang.tools.invariance [SCENE ...] [--out STEM]

Every scene is an engine in processes of its own, all side by side: ours and SGLang's own backends
with ``enable_deterministic_inference``, and ours without it. Nothing is cached, and ragged prompts
are whole. A line has, for each mix of prompts, how many of them say what they said alone, and of
which lengths the others are. The exit status is 1 if prompts in a scene of ours that promises their
bits did not keep them.
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

_POOL = 131_072  # tokens: no row is put off once it has begun

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
    """Return what the engine of a scene is made with."""
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
        mem_fraction_static=0.6,  # the pool is smaller; engines beside this one take memory too
        **scene.arguments,
    )


def run(model: Path, scene: Scene, use: Callable[[Ask], None]) -> None:
    """Make an engine, and hand on how to ask it."""
    run_engine(given(model, scene), lambda engine: use(partial(ask, engine)))


if __name__ == "__main__":
    sys.exit(COMMAND.main(__doc__, run))
