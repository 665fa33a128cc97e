"""What ``check`` asks: how an engine is set up, which others answer beside, and the prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paged_mla_optimized.engines.tools.history import prompts as ragged_prompts

YARDSTICK = "triton"
_DEFAULT = "fa3"  # SGLang's, on Hopper
LONGEST = 12_000
CONTEXT_LEN = 16_384


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One set-up.

    Parameters
    ----------
    mode : str
        One of ``engine.MODES``.
    peers : tuple of str
        SGLang's own backends that are asked too. How far they are apart is pooled over scenes of
        one model and type of cache: few of each are enough.
    page_size, heads : int
    kv_cache_dtype : str
    tokens : int
        Fewest that are generated for each prompt: the most of few steps is chance.
    retracts : bool
        A row is taken back every few steps and prefilled again, as when the pool is full.
    arguments : dict
        Arguments of ``sglang.Engine`` beside every backend.
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
        """Whether a model drafts: it is the model itself, whose drafts are nearly all right."""
        return self.arguments.get("speculative_algorithm") == "STANDALONE"

    @property
    def environment(self) -> dict[str, str]:
        """What SGLang is told beside its arguments: how it tests itself."""
        return _RETRACTING if self.retracts else {}

    @property
    def plain(self) -> Scene:
        """The same model and type of cache, eagerly, in pages of 64 and with no drafts."""
        return Scene(mode="eager", heads=self.heads, kv_cache_dtype=self.kv_cache_dtype)

    @property
    def history(self) -> str:
        """Name of the history that scenes of this model and type of cache share."""
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
_TENSOR_PARALLEL = {  # sums over ranks by NCCL alone: other ways would be compiled
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
"""By name. SGLang lets backends that it does not know have trees with pages of 1 alone."""

SCENES_OF_TWO_GPUS = {
    "tensor-parallel": Scene(peers=(YARDSTICK, _DEFAULT), arguments=_TENSOR_PARALLEL),
    "tensor-parallel-chain": Scene(peers=(YARDSTICK,), arguments=_TENSOR_PARALLEL | _CHAIN),
}
"""Their histories are of one GPU."""

EVERY_SCENE = SCENES | SCENES_OF_TWO_GPUS

prompts = partial(ragged_prompts, LONGEST)
