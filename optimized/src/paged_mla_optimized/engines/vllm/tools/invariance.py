"""Generate with vLLM for prompts alone and in batches, and compare the logprobs bit for bit.

    python -m paged_mla_optimized.engines.vllm.tools.invariance [WORKLOAD ...] [--out STEM]

Every workload is an engine in its own process, and all run at the same time: this backend and
vLLM's own backends with ``VLLM_BATCH_INVARIANT=1``, and this backend without it. There is no prefix
cache. Prompts of different lengths are processed whole, except in the workloads with chunks, where
the other rows of a step decide where a prompt is split; these are not required to keep their bits.
The workloads that are required to keep them launch the norms of sums for few tokens at a time,
because vLLM 0.25 sums a token's squares in another order in launches of 256 tokens or more
(https://github.com/vllm-project/vllm/issues/48271). A line has, for each mix of prompts, the number
of prompts whose logprobs equal those of the prompt alone, and the lengths of the other prompts. The
exit status is 1 if a workload that is required to keep its bits did not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.tools.history import Ask
from paged_mla_optimized.engines.tools.invariance import (
    MAX_LEN,
    MAX_TOKENS,
    ROWS,
    Command,
    Scene,
)
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import (
    BATCH_INVARIANT,
    arguments,
    ask,
    run_engine,
)

_OURS = Scene(backend=NAME, is_promised=True)
_OUR_PREFILL = {"attention_config": {"mla_prefill_backend": NAME}}
_CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048}
_TOKENS_OF_A_NORM = 255
_SIZES = [1, 2, 4, 8, ROWS]  # tokens of the captured graphs
_CACHE_BYTES = 2 << 30

COMMAND = Command(
    engine="vllm",
    scenes={
        "ours": _OURS,
        "ours-128": Scene(backend=NAME, heads=128, is_promised=True),
        "ours-prefill": Scene(backend=NAME, is_promised=True, arguments=_OUR_PREFILL),
        "ours-fp8": Scene(backend=NAME, is_promised=True, arguments={"kv_cache_dtype": "fp8"}),
        "ours-with-its-norms": Scene(backend=NAME),
        "ours-off": Scene(backend=NAME, is_on=False),
        "ours-chunks": Scene(backend=NAME, arguments=_CHUNKS),
        "FLASH_ATTN_MLA": Scene(backend="FLASH_ATTN_MLA"),
        "FLASH_ATTN_MLA-chunks": Scene(backend="FLASH_ATTN_MLA", arguments=_CHUNKS),
        "TRITON_MLA": Scene(backend="TRITON_MLA"),
        "FLASHMLA": Scene(backend="FLASHMLA"),  # 0.25 raises an error for it
    },
)


def given(model: Path, scene: Scene) -> dict[str, Any]:
    """Return the arguments of a workload's engine."""
    common = {
        "block_size": 64,
        "max_model_len": MAX_LEN,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": MAX_TOKENS,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        "gpu_memory_utilization": 0.1,
    }
    return arguments(model, scene.backend, "full", sizes=_SIZES, **(common | scene.arguments))


def run(model: Path, scene: Scene, use: Callable[[Ask], None]) -> None:
    """Create an engine, with or without the mode, and pass a function that generates to `use`."""
    os.environ[BATCH_INVARIANT] = str(int(scene.is_on))

    def use_engine(llm: Any) -> None:
        if scene.is_promised:
            from vllm import _custom_ops  # after the engine has set the environment

            launch_norms_in_parts(_custom_ops)
        use(partial(ask, llm))

    run_engine(given(model, scene), use_engine)


def launch_norms_in_parts(ops: Any) -> None:
    """Make norms of sums round each token as in a launch of few tokens, in this process.

    Parameters
    ----------
    ops : module
        ``vllm._custom_ops``.
    """
    norm = ops.fused_add_rms_norm

    def in_parts(tokens: Any, residual: Any, *rest: Any) -> None:
        parts = (each.split(_TOKENS_OF_A_NORM) for each in (tokens, residual))
        for part, residual_part in zip(*parts, strict=True):
            norm(part, residual_part, *rest)

    ops.fused_add_rms_norm = in_parts


if __name__ == "__main__":
    sys.exit(COMMAND.main(__doc__, run))
