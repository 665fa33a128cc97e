"""Create, use and end one SGLang engine."""

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

LIKELIEST = 8  # logprobs of this many tokens are recorded for each position
MODES = ("eager", "graphs")


def decode_rows_of(backend: str) -> dict[str, str]:
    """Return arguments with which a backend runs decode rows, and fa3 runs the prefill.

    fa3 is SGLang's default backend on Hopper.
    """
    return {"attention_backend": "fa3", "decode_attention_backend": backend}


DECODE_ALONE: dict[str, dict[str, Any]] = {
    "flashmla": {
        **decode_rows_of("flashmla"),
        "speculative_attention_mode": "decode",  # flashmla also verifies drafts
    }
}
"""Arguments of backends that run decode rows only. Their prefill would use kernels of another
package, which compiles them at the first use."""


def arguments(model: Path, backend: str, mode: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine``.

    Parameters
    ----------
    model : Path
    backend : str
        The name in SGLang's registry; see :data:`DECODE_ALONE`.
    mode : str
        One of :data:`MODES`.
    **changes
        Further arguments, which replace arguments of this function.
    """
    found: dict[str, Any] = {
        "model_path": str(model),
        "attention_backend": backend,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",  # other backends would be compiled first
        "random_seed": 0,
        "log_level": "error",
        "disable_cuda_graph": mode == "eager",
        "disable_prefill_cuda_graph": True,
    }
    return found | DECODE_ALONE.get(backend, {}) | changes


def survive(*_signal: Any) -> None:
    """Do nothing.

    If this function handles SIGQUIT, SGLang raises an error if an engine cannot start; the default
    handler ends this process. An engine that fails later ends this process with both handlers.
    """


def run_engine(given: dict[str, Any], use: Callable[[Any], T]) -> T:
    """Create an engine, return the result of `use`, and end the engine's processes.

    Raises
    ------
    RuntimeError
        The arguments name this package's backend, and its entry point is not installed.
    """
    if NAME in given.values() and not entry_points(group=GROUP, name=NAME):
        raise RuntimeError(
            f"no entry point {NAME!r} of the group {GROUP!r} is installed, and SGLang's processes "
            "find the backend by it; install paged-mla in the environment of SGLang"
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
    """Generate ``tokens[i]`` tokens for prompt i, greedily.

    Returns the generated tokens for each prompt, each with the logprobs of itself and of the
    :data:`LIKELIEST` tokens, and the number of cached prompt tokens of all prompts. The number of
    retractions is added to `counts` as ``retractions``.
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
