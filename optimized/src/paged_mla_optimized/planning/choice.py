"""Choose the query length that determines a step's kernel variant."""

from __future__ import annotations

from paged_mla_optimized.config.arguments import integer
from paged_mla_optimized.config.attention import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.planning.families import Demand
from paged_mla_shared.errors import InvalidArgument


def demand_of(config: MlaConfig, arch: str) -> Demand:
    """Return the demand of instances of `config` on an architecture."""
    return Demand(
        arch=arch,
        dtype=DTYPE_NAMES[config.dtype],
        cache_format=config.cache_format,
        products=config.products,
        num_heads=config.num_heads,
        head_dims=(config.kv_lora_rank, config.qk_rope_head_dim),
    )


def most_query_len(config: MlaConfig) -> int:
    """Return the longest query of a row that the capacities allow."""
    return config.max_draft_tokens if config.is_tree else config.max_query_tokens


def step_query_len(
    config: MlaConfig, num_rows: int, num_tokens: int, max_query_len: int | None
) -> int:
    """Return the query length that determines a step's tiles; rows may be longer.

    This is `max_query_len` if the step has one. Otherwise, a step with no more tokens than rows
    counts as decode, with length 1, unless the mask is a tree. If a row of such a step has several
    tokens, its output is correct, but slower than with matching tiles. Any other step gets the
    longest query that the capacities allow, independent of its own lengths, so that padding changes
    no bit (S-17).

    With ``batch_invariant`` every step without `max_query_len` gets the tiles of a step of full
    capacities. Kernel variants differ in their bits, and the bits of a row must not depend on the
    other rows (S-20).
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
