"""One SGLang engine: how it is made, asked and ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from paged_mla_optimized.engines.sglang.registration import GROUP, NAME
from paged_mla_optimized.engines.tools.follow import Logprobs

T = TypeVar("T")

LIKELIEST = 8
MODES = ("eager", "graphs")


def decode_rows_of(backend: str) -> dict[str, str]:
    """Return what asks a backend for decode rows: SGLang's default on Hopper takes its prompts."""
    return {"attention_backend": "fa3", "decode_attention_backend": backend}


DECODE_ALONE: dict[str, dict[str, Any]] = {
    "flashmla": {
        **decode_rows_of("flashmla"),
        "speculative_attention_mode": "decode",  # it verifies too
    }
}
"""Backends that are asked for decode rows alone: they would hand prompts to kernels of another
package, compiled as they are first used."""


def arguments(model: Path, backend: str, mode: str, **changes: Any) -> dict[str, Any]:
    """Return what ``sglang.Engine`` is made with.

    Parameters
    ----------
    model : Path
    backend : str
        Name in SGLang's registry; see :data:`DECODE_ALONE`.
    mode : str
        One of :data:`MODES`.
    """
    found: dict[str, Any] = {
        "model_path": str(model),
        "attention_backend": backend,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",  # another would be compiled
        "random_seed": 0,
        "log_level": "error",
        "disable_cuda_graph": mode == "eager",
        "disable_prefill_cuda_graph": True,
    }
    return found | DECODE_ALONE.get(backend, {}) | changes


def survive(*_signal: Any) -> None:
    """Handle the signal of an engine that cannot start: then SGLang raises an error.

    By default it would end this process. It does in any case where an engine fails at work.
    """


def run_engine(given: dict[str, Any], use: Callable[[Any], T]) -> T:
    """Make an engine, use it, and end its processes.

    Raises
    ------
    RuntimeError
        This backend is asked for, and SGLang's processes could not find it.
    """
    if NAME in given.values() and not entry_points(group=GROUP, name=NAME):
        raise RuntimeError(
            f"no entry point {NAME!r} of the group {GROUP!r} is installed, by which processes of "
            "SGLang find this backend: install paged-mla beside SGLang"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import sglang  # reads the environment

    engine = sglang.Engine(**given)
    try:
        return use(engine)
    finally:
        engine.shutdown()


def ask(
    engine: Any,
    prompts: list[list[int]],
    tokens: list[int],
    counts: Counter[str] | None = None,
) -> tuple[list[list[tuple[int, Logprobs]]], int]:
    """Generate greedily; return tokens with logprobs, and prompt tokens that were cached.

    How often a row was taken back is added to `counts`, as ``retractions``.
    """
    outputs = engine.generate(
        input_ids=prompts,
        sampling_params=[
            {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in tokens
        ],
        return_logprob=True,
        top_logprobs_num=LIKELIEST,
    )
    told = [output["meta_info"] for output in outputs]
    answers = [
        [
            (token, {token: logprob} | {other: value for value, other, _ in likeliest})
            for (logprob, token, _), likeliest in zip(
                one["output_token_logprobs"], one["output_top_logprobs"], strict=True
            )
        ]
        for one in told
    ]
    if counts is not None:
        counts["retractions"] += sum(one["num_retractions"] for one in told)
    return answers, sum(one["cached_tokens"] for one in told)
