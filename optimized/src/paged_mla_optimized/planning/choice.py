"""The query length that a step's kernel is chosen for."""

from __future__ import annotations

from paged_mla_optimized.config.arguments import integer
from paged_mla_optimized.config.attention import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.planning.families import Demand
from paged_mla_shared.errors import InvalidArgument


def demand_of(config: MlaConfig, arch: str) -> Demand:
    """Return what instances of `config` ask of kernels on `arch`."""
    return Demand(
        arch=arch,
        dtype=DTYPE_NAMES[config.dtype],
        cache_format=config.cache_format,
        products=config.products,
        num_heads=config.num_heads,
        head_dims=(config.kv_lora_rank, config.qk_rope_head_dim),
    )


def most_query_len(config: MlaConfig) -> int:
    """Return the longest query of any row that the capacities allow."""
    return config.max_draft_tokens if config.is_tree else config.max_query_tokens


def step_query_len(
    config: MlaConfig, num_rows: int, num_tokens: int, max_query_len: int | None
) -> int:
    """Return the query length that a step's tiles are made for; rows may be longer.

    That is `max_query_len` where the step has one. Else a step with no more tokens than rows is
    taken for decode, and gets 1. One of its rows may have several tokens all the same: its answer
    is right, but slower than in tiles made for it. Other steps get the longest query that the
    capacities allow, whatever their own lengths, so that padding changes no bit of a step (S-17).

    With ``batch_invariant`` every step without `max_query_len` gets the tiles of a step of full
    capacities: kernels differ in their bits, and the bits of a row may not depend on the other rows
    (S-20).
    """
    if max_query_len is not None:
        max_query_len = integer("max_query_len", max_query_len)
        if max_query_len < 1:
            raise InvalidArgument("max_query_len", max_query_len, ">= 1, or None")
        return max_query_len
    if config.batch_invariant:
        num_rows, num_tokens = config.max_rows, config.max_query_tokens
    is_decode = num_tokens <= num_rows and not config.is_tree
    return 1 if is_decode else most_query_len(config)
