"""Create, use and end one vLLM engine in this process."""

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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it needs multicast, which virtual machines may lack
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",  # other processes compile too
}
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""The variable that turns on vLLM's batch-invariant mode with the value "1"."""
LIKELIEST = 8
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {},
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {"cudagraph_mode": "PIECEWISE"},
    "default": {},  # compiled; full graphs for decode, pieces for the rest
}
"""The ``compilation_config`` of each mode of an engine."""


def arguments(
    model: Path, backend: str, mode: str, *, sizes: list[int], **changes: Any
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``.

    Parameters
    ----------
    model : Path
    backend : str
        The name in vLLM's registry.
    mode : str
        A key of :data:`GRAPHS`.
    sizes : list of int
        The numbers of tokens of the captured graphs.
    **changes
        Further arguments, which replace arguments of this function.
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
    """Return a ``profiler_config`` with which vLLM writes a trace of kernels for each profile."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.absolute()),
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }


def prepare() -> None:
    """Set the environment variables that vLLM reads at its import, unless they are set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A port below the system's ephemeral ports, and different from those of parallel processes.
    os.environ.setdefault("VLLM_PORT", str(10_000 + 20 * (os.getpid() % 1000)))


def give_cores_processes(at_once: int) -> None:
    """Run the core of each engine in its own process, as by default.

    Parameters
    ----------
    at_once : int
        The number of engines that run at the same time. With several engines, this process has
        threads of the first engine when it creates the next, so it spawns processes instead of
        forking.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if at_once > 1:
        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"


def run_engine(given: dict[str, Any], use: Callable[[Any], T]) -> T:
    """Create an engine, return the result of `use`, and free the engine's memory."""
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

    register()  # needed if the package is not installed and so has no entry point
    # Without it vLLM inspects these classes in another process, which takes 20 s.
    for model in (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM):
        ModelRegistry.register_model(model.__name__, model)
    ModelRegistry.register_model("DeepSeekMTPModel", DeepSeekMTP)
    _free()  # the memory of an earlier engine that failed
    llm = LLM(**given)
    try:
        return use(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        # Only an engine whose core runs in this process initializes CUDA here.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types
            cleanup_dist_env_and_memory()
        _free()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def hold(llm: Any, prompts: list[list[int]], tokens: int) -> list[str]:
    """Add requests that do not start before :func:`release`; return their names.

    Without this pause, a core in another process would start the first request before it has the
    last one.
    """
    from vllm import SamplingParams

    core = llm.llm_engine
    core.sleep(level=0, mode="keep")
    way = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    names = [core.add_request(uuid.uuid4().hex, {"prompt_token_ids": p}, way) for p in prompts]
    core.is_sleeping()  # returns after the core has received all requests
    return names


def release(llm: Any) -> None:
    """Start the held requests, all in the same step."""
    llm.llm_engine.wake_up(["scheduling"])


def traced(llm: Any, folder: Path, work: Callable[[], object]) -> list[dict[str, Any]]:
    """Profile `work` and return the events of its trace.

    The engine must have been created with the ``profiler_config`` of :func:`profiler` for `folder`.
    """
    llm.start_profile()
    work()
    llm.stop_profile()
    return take(folder)


def ask(
    llm: Any, prompts: list[list[int]], tokens: list[int]
) -> tuple[list[list[tuple[int, Logprobs]]], int]:
    """Generate greedily; return tokens with logprobs, and the number of cached prompt tokens."""
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
