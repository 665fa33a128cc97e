"""One vLLM engine in this process: how it is made, asked and ended."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from paged_mla_optimized.engines.tools.follow import Logprobs
from paged_mla_optimized.engines.tools.trace import take
from paged_mla_optimized.engines.vllm.registration import register

T = TypeVar("T")

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # multicast, which virtual machines may not have
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",  # other processes compile too
}
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""The variable that says "1" where bits are not to depend on the batch."""
LIKELIEST = 8
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {},
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {"cudagraph_mode": "PIECEWISE"},
    "default": {},  # compiled; full graphs for decode, pieces for the rest
}
"""``compilation_config`` of each mode that an engine may run in."""


def arguments(
    model: Path, backend: str, mode: str, *, sizes: list[int], **changes: Any
) -> dict[str, Any]:
    """Return what ``vllm.LLM`` is made with.

    Parameters
    ----------
    model : Path
    backend : str
        Name in vLLM's registry.
    mode : str
        Key of :data:`GRAPHS`.
    sizes : list of int
        Tokens of the captured graphs.
    """
    found: dict[str, Any] = {
        "model": str(model),
        "attention_backend": backend,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "disable_log_stats": True,
    }
    if mode == "eager":
        found["enforce_eager"] = True
    else:
        found["compilation_config"] = GRAPHS[mode] | {"cudagraph_capture_sizes": sizes}
    return found | changes


def profiler(folder: Path) -> dict[str, Any]:
    """Return the ``profiler_config`` that has traces of kernels written, one of each use."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.absolute()),
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }


def prepare() -> None:
    """Set the environment that vLLM reads as it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Below what the system gives away, and apart from what other processes here begin with.
    os.environ.setdefault("VLLM_PORT", str(10_000 + 20 * (os.getpid() % 1000)))


def give_cores_processes(at_once: int) -> None:
    """Have cores of engines in processes of their own, as by default.

    Where several engines live `at_once`, this process has threads of the first when the next is
    made: it is not forked then.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if at_once > 1:
        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"


def run_engine(given: dict[str, Any], use: Callable[[Any], T]) -> T:
    """Make an engine, use it, and give back all that it held."""
    prepare()
    from vllm import LLM, ModelRegistry  # reads the environment
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
    )
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.deepseek_v2 import (
        DeepseekV2ForCausalLM,
        DeepseekV3ForCausalLM,
    )

    register()  # also where the package is not installed, and has no entry point
    # Otherwise vLLM looks classes up in a process of its own, which takes 20 s.
    for model in (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM):
        ModelRegistry.register_model(model.__name__, model)
    ModelRegistry.register_model("DeepSeekMTPModel", DeepSeekMTP)
    _free()  # of an engine that failed
    llm = LLM(**given)
    try:
        return use(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        # Otherwise the engine's core had a process of its own.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types
            cleanup_dist_env_and_memory()
        _free()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def hold(llm: Any, prompts: list[list[int]], tokens: int) -> list[str]:
    """Add requests that wait for each other and for :func:`release`; return their names.

    A core in a process of its own would begin with the first before it has the last.
    """
    from vllm import SamplingParams

    core = llm.llm_engine
    core.sleep(level=0, mode="keep")
    way = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    names = [core.add_request(uuid.uuid4().hex, {"prompt_token_ids": p}, way) for p in prompts]
    core.is_sleeping()  # is answered when all are there
    return names


def release(llm: Any) -> None:
    """Let requests begin, all in the same step."""
    llm.llm_engine.wake_up(["scheduling"])


def traced(llm: Any, folder: Path, work: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the events of `work`, of an engine that :func:`profiler` has write to a folder."""
    llm.start_profile()
    work()
    llm.stop_profile()
    return take(folder)


def ask(
    llm: Any, prompts: list[list[int]], tokens: list[int]
) -> tuple[list[list[tuple[int, Logprobs]]], int]:
    """Generate greedily; return tokens with logprobs, and prompt tokens that were cached."""
    from vllm import SamplingParams

    ways = [
        SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=LIKELIEST
        )
        for n in tokens
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], ways, use_tqdm=False)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    answers = []
    for output in outputs:
        [one] = output.outputs
        steps = [{t: x.logprob for t, x in step.items()} for step in one.logprobs]
        answers.append(list(zip(one.token_ids, steps, strict=True)))
    return answers, cached
