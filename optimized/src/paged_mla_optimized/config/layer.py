"""The configuration of a :class:`~paged_mla_optimized.api.layer.MlaLayer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch

from paged_mla_optimized.config.arguments import check_kind, take_integers
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.huggingface import attention_of
from paged_mla_optimized.config.limits import MAX_MODEL_LEN
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_shared.errors import InvalidArgument, Unsupported

_WORKSPACE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The layers of one model on one rank, their caches, and the sizes of their largest step.

    Parameters
    ----------
    attention : MlaConfig
        Heads, cache and capacities, as for :class:`~paged_mla_optimized.api.paged_mla.PagedMla`.
        With a mask other than "causal" all rows are absorbed.
    qk_nope_head_dim, v_head_dim : int
        N and V, in the ranges of :class:`~paged_mla_optimized.config.prefill.PrefillConfig`.
    workspace_tokens : int or None
        Largest number of keys that are materialized at once, ``max_query_tokens`` to 2^30.
        ``None`` uses the number whose keys and values fit in 1 GiB (65536 for 32 of DeepSeek-V3's
        heads), at most ``max_rows * max_model_len`` and at least ``max_query_tokens``. With a mask
        other than "causal" no keys are materialized.

    Raises
    ------
    InvalidArgument
        A value is outside its legal range.
    Unsupported
        The kernels do not support the head sizes; or ``batch_invariant`` is set, which layers do
        not support: the bits of matrix products with weights depend on the number of tokens.
    """

    attention: MlaConfig
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    workspace_tokens: int | None = None
    prefill: PrefillConfig = field(init=False, repr=False)
    """The configuration of the attention of materialized rows."""

    def __post_init__(self) -> None:
        attention = self.attention
        check_kind("attention", attention, MlaConfig)
        take_integers(self, "qk_nope_head_dim", "v_head_dim")
        if self.workspace_tokens is not None:
            take_integers(self, "workspace_tokens")
        if attention.batch_invariant:
            raise Unsupported(
                "batch_invariant=True is not supported by MlaLayer, because the bits of products "
                "with weights depend on the number of tokens; set batch_invariant=False in the "
                "MlaConfig"
            )
        prefill = PrefillConfig(
            num_heads=attention.num_heads,
            softmax_scale=attention.softmax_scale,
            max_rows=attention.max_rows,
            max_tokens=attention.max_query_tokens,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=attention.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            dtype=attention.dtype,
        )
        object.__setattr__(self, "prefill", prefill)
        fewest, given = attention.max_query_tokens, self.workspace_tokens
        if given is not None and not fewest <= given <= MAX_MODEL_LEN:
            allowed = f"max_query_tokens = {fewest} to {MAX_MODEL_LEN}, or None"
            raise InvalidArgument("workspace_tokens", given, allowed)

    @classmethod
    def from_hf(
        cls,
        config: object,
        *,
        block_size: int,
        max_rows: int,
        max_query_tokens: int,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the layers of a model from its config in the transformers library.

        Parameters and errors are those of :meth:`MlaConfig.from_hf`. To change other fields of the
        attention, use ``replace(layer, attention=replace(layer.attention, ...))``.
        """
        attention = MlaConfig.from_hf(
            config,
            block_size=block_size,
            max_rows=max_rows,
            max_query_tokens=max_query_tokens,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
        )
        dims = attention_of(config).dims
        return cls(
            attention=attention,
            qk_nope_head_dim=dims.qk_nope_head_dim,
            v_head_dim=dims.v_head_dim,
        )

    @property
    def projected(self) -> int:
        """Elements of the keys without position and of the values of one token, for all heads."""
        return self.attention.num_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def room(self) -> int:
        """Largest number of keys that are materialized at once; 0 if no row is materialized."""
        if self.attention.mask != "causal":
            return 0
        if self.workspace_tokens is not None:
            return self.workspace_tokens
        attention = self.attention
        fitting = _WORKSPACE_BYTES // (self.projected * attention.dtype.itemsize)
        most = attention.max_rows * attention.max_model_len
        return max(min(fitting, most), attention.max_query_tokens)
