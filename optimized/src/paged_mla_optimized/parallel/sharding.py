"""A cache divided over ranks (rule S-18): what a rank has of a row, and of a config."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_optimized.config.arguments import check_at_least, check_rank, integer
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.limits import MAX_HEADS, MAX_ROWS
from paged_mla_optimized.parallel.heads import heads_of_rank
from paged_mla_shared.errors import InvalidArgument


def local_len(seq_len: int, *, world: int, rank: int, interleave: int = 1) -> int:
    """Return how many of a row's `seq_len` tokens a rank caches.

    Rank r caches position p where ``(p // interleave) % world == r``. For a host that counts
    memory or transfers; steps count on the device.

    Raises
    ------
    InvalidArgument
        No rank of no world, or tokens below 0.
    """
    check_at_least(0, seq_len=seq_len)
    check_at_least(1, interleave=interleave)
    check_rank(world, rank)
    rounds, left = divmod(seq_len, world * interleave)
    return rounds * interleave + min(max(left - rank * interleave, 0), interleave)


def local_config(config: MlaConfig, *, world: int, interleave: int) -> MlaConfig:
    """Return the config of what each rank attends: all queries, each a row, to its own keys.

    Every rank is given as many heads as rank 0 has, so that all of them send as much; heads that
    are not there cost time and are dropped.

    Raises
    ------
    InvalidArgument
        The config asks for what a rank that knows only its own keys cannot do.
    """
    if config.mask != "causal":
        allowed = "causal: other queries of a row do not see the first of a rank's keys"
        raise InvalidArgument("mask", config.mask, allowed)
    if config.rope is not None:
        allowed = "None: rotate queries and keys at `positions`, a rank's own count is another"
        raise InvalidArgument("rope", config.rope, allowed)
    if config.table_multiple:
        allowed = "0: block tables are given"
        raise InvalidArgument("table_multiple", config.table_multiple, allowed)
    if integer("interleave", interleave) < 1 or config.block_size % interleave:
        allowed = f"a divisor of block_size = {config.block_size}"
        raise InvalidArgument("interleave", interleave, allowed)
    if config.max_query_tokens > MAX_ROWS:
        allowed = f"1 to {MAX_ROWS}: on each rank every token is a row"
        raise InvalidArgument("max_query_tokens", config.max_query_tokens, allowed)
    num_heads = world * len(heads_of_rank(config.num_heads, world, 0))
    if num_heads > MAX_HEADS:
        allowed = f"1 to {MAX_HEADS // world * world}, as each of {world} ranks sends as many heads"
        raise InvalidArgument("num_heads", config.num_heads, allowed)
    longest = local_len(config.max_model_len, world=world, rank=0, interleave=interleave)
    return replace(
        config,
        num_heads=num_heads,
        max_rows=config.max_query_tokens,
        max_model_len=longest,
        lse_base="e",
    )
