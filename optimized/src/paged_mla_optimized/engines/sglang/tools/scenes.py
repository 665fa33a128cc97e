"""The workloads of ``check``: configurations of the engine, other backends, and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paged_mla_optimized.engines.tools.history import prompts as ragged_prompts

YARDSTICK = "triton"
_DEFAULT = "fa3"  # SGLang's default backend on Hopper
LONGEST = 12_000
CONTEXT_LEN = 16_384


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One workload.

    Parameters
    ----------
    mode : str
        One of ``engine.MODES``.
    peers : tuple of str
        SGLang's own backends that run the workload too. Their distances are pooled over all
        workloads of the same model and cache dtype, so that few backends per workload are enough.
    page_size, heads : int
    kv_cache_dtype : str
    tokens : int
        The least number of tokens to generate for each prompt. The largest difference of few steps
        depends on chance.
    retracts : bool
        Whether SGLang retracts a row every few steps and prefills it again, as with a full pool.
    arguments : dict
        Arguments of ``sglang.Engine`` for every backend.
    """

    mode: str = "graphs"
    peers: tuple[str, ...] = (_DEFAULT,)
    page_size: int = 64
    heads: int = 16
    kv_cache_dtype: str = "auto"
    tokens: int = 1
    retracts: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model drafts.

        It is a copy of the model, so that nearly all drafts are accepted.
        """
        return self.arguments.get("speculative_algorithm") == "STANDALONE"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for SGLang, which it uses for its own tests."""
        return _RETRACTING if self.retracts else {}

    @property
    def plain(self) -> Scene:
        """A workload of the same model and cache dtype: eager, with pages of 64, without drafts."""
        return Scene(mode="eager", heads=self.heads, kv_cache_dtype=self.kv_cache_dtype)

    @property
    def history(self) -> str:
        """The name of the history that all workloads of this model and cache dtype share."""
        return f"history-h{self.heads}-{self.kv_cache_dtype}"


_RETRACTING = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
_NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
_CHAIN = _NGRAM | {"speculative_ngram_max_bfs_breadth": 1}
_DRAFT_MODEL = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
_TREES = _DRAFT_MODEL | {
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
    "speculative_draft_attention_backend": "triton",
}
_TENSOR_PARALLEL = {  # only NCCL adds over ranks, because other methods would be compiled first
    "tp_size": 2,
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}

SCENES = {
    "graphs": Scene(peers=(_DEFAULT, YARDSTICK, "flashmla")),
    "eager": Scene(mode="eager"),
    "heads-128": Scene(heads=128, peers=(_DEFAULT, YARDSTICK, "flashmla"), tokens=256),
    "page-16": Scene(page_size=16),
    "fp8": Scene(kv_cache_dtype="fp8_e4m3", peers=(_DEFAULT, YARDSTICK)),
    "retraction": Scene(retracts=True),
    "mixed": Scene(arguments={"enable_mixed_chunk": True}),
    "chain": Scene(arguments=_CHAIN),
    "draft-model": Scene(arguments=_DRAFT_MODEL),
    "tree": Scene(page_size=1, peers=(YARDSTICK,), arguments=_NGRAM),
    "draft-tree": Scene(page_size=1, peers=(YARDSTICK,), arguments=_TREES),
}
"""The workloads by name. SGLang allows draft trees of a plugin's backend only with pages of 1."""

SCENES_OF_TWO_GPUS = {
    "tensor-parallel": Scene(peers=(YARDSTICK, _DEFAULT), arguments=_TENSOR_PARALLEL),
    "tensor-parallel-chain": Scene(peers=(YARDSTICK,), arguments=_TENSOR_PARALLEL | _CHAIN),
}
"""The workloads on two GPUs. Their histories are generated on one GPU."""

EVERY_SCENE = SCENES | SCENES_OF_TWO_GPUS

prompts = partial(ragged_prompts, LONGEST)
