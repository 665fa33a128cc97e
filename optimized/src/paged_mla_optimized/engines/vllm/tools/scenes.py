"""The workloads of ``check``: configurations of the engine, other backends, and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paged_mla_optimized.engines.tools.history import prompts as ragged_prompts
from paged_mla_optimized.engines.vllm.options import KEY
from paged_mla_optimized.engines.vllm.registration import NAME

YARDSTICK = "TRITON_MLA"
_ALL = (YARDSTICK, "FLASHMLA", "FLASH_ATTN_MLA")
LONGEST = 30_000
MAX_MODEL_LEN = 30_208  # the longest prompt and its generated tokens, in whole blocks


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One workload.

    Parameters
    ----------
    mode : str
        A key of ``engine.GRAPHS``.
    peers : tuple of str
        vLLM's own backends that support the workload. The CUDA graphs of TRITON_MLA do not support
        drafts.
    block_size, heads : int
    kv_cache_dtype : str
    drafts : int
        The number of drafts in a step.
    speculation : dict
        vLLM's ``speculative_config`` without the number of drafts. A draft model is the model
        itself, so that nearly all drafts are accepted.
    ours : dict
        Arguments of ``vllm.LLM`` for this package's backend only.
    arguments : dict
        Arguments for every backend.
    preempts : bool
        Whether the cache is too small for all tokens.
    own_process : bool
        Whether the engine's core runs in its own process, as by default, where vLLM finds this
        package by its entry point.
    """

    mode: str
    peers: tuple[str, ...] = _ALL
    block_size: int = 64
    heads: int = 16
    kv_cache_dtype: str = "auto"
    drafts: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    preempts: bool = False
    own_process: bool = False

    @property
    def has_mtp(self) -> bool:
        """Whether the model has an MTP layer that drafts."""
        return self.speculation.get("method") == "mtp"

    @property
    def has_draft_model(self) -> bool:
        """Whether another model drafts."""
        return self.speculation.get("method") == "draft_model"


_OF_DRAFTS = ("FLASHMLA", "FLASH_ATTN_MLA")
_OF_16 = (YARDSTICK, "FLASH_ATTN_MLA")  # they support blocks of 16
_OF_FP8 = (YARDSTICK, "FLASHMLA")
_NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
_ABSORBED = {"additional_config": {KEY: {"absorbed_query_len": 2048}}}
_OUR_PREFILL = {"attention_config": {"mla_prefill_backend": NAME}}
_FEW_BLOCKS = {
    "num_gpu_blocks_override": 480,
    "scheduler_reserve_full_isl": False,  # with True no request starts that might be preempted
}
_TENSOR_PARALLEL = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}  # NCCL only
_CONTEXT_PARALLEL = _TENSOR_PARALLEL | {"decode_context_parallel_size": 2}

SCENES = {
    "piecewise": Scene(mode="piecewise"),
    "default": Scene(mode="default"),
    "eager": Scene(mode="eager"),
    "full": Scene(mode="full"),
    "heads-128": Scene(mode="full", heads=128),
    "block-16": Scene(mode="full", block_size=16, peers=_OF_16),
    "fp8": Scene(mode="full", kv_cache_dtype="fp8", peers=_OF_FP8),
    "fp8-block-16": Scene(mode="eager", kv_cache_dtype="fp8", block_size=16, peers=(YARDSTICK,)),
    "fp8-piecewise": Scene(mode="piecewise", kv_cache_dtype="fp8", peers=("FLASHMLA",)),
    "fp8-preemption": Scene(
        mode="full", kv_cache_dtype="fp8", arguments=_FEW_BLOCKS, preempts=True, peers=("FLASHMLA",)
    ),
    "preemption": Scene(mode="full", arguments=_FEW_BLOCKS, preempts=True),
    "ngram": Scene(mode="full", drafts=3, speculation=_NGRAM, peers=_OF_DRAFTS),
    "ngram-eager": Scene(mode="eager", drafts=3, speculation=_NGRAM),
    "ngram-fp8": Scene(
        mode="full", drafts=3, speculation=_NGRAM, kv_cache_dtype="fp8", peers=("FLASHMLA",)
    ),
    "mtp": Scene(mode="full", drafts=1, speculation={"method": "mtp"}, peers=_OF_DRAFTS),
    "draft-model": Scene(
        mode="full", drafts=3, speculation={"method": "draft_model"}, peers=_OF_DRAFTS
    ),
    "absorbed-prefill": Scene(mode="full", ours=_ABSORBED),
    "own-prefill": Scene(mode="full", ours=_OUR_PREFILL),
    "own-process": Scene(mode="full", own_process=True, peers=_OF_DRAFTS),
}
"""The workloads by name, the slowest first."""

SCENES_OF_TWO_GPUS = {
    "tensor-parallel": Scene(mode="full", arguments=_TENSOR_PARALLEL, peers=_OF_DRAFTS),
    "tensor-parallel-ngram": Scene(
        mode="full", arguments=_TENSOR_PARALLEL, drafts=3, speculation=_NGRAM, peers=_OF_DRAFTS
    ),
    "context-parallel": Scene(mode="full", arguments=_CONTEXT_PARALLEL, peers=_OF_DRAFTS),
    "context-parallel-eager": Scene(mode="eager", arguments=_CONTEXT_PARALLEL, peers=_OF_DRAFTS),
}
"""The workloads on two GPUs. Their histories are generated on one GPU."""

prompts = partial(ragged_prompts, LONGEST)
