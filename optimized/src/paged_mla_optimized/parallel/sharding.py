"""A cache that is divided over ranks (rule S-18): the tokens and the config of one rank."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_optimized.config.arguments import check_at_least, check_rank, integer
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.limits import MAX_HEADS, MAX_ROWS
from paged_mla_optimized.parallel.heads import heads_of_rank
from paged_mla_shared.errors import InvalidArgument


def local_len(seq_len: int, *, world: int, rank: int, interleave: int = 1) -> int:
    """Return the number of a row's `seq_len` tokens that a rank caches.

    Rank r caches position p if ``(p // interleave) % world == r``. This function is for memory or
    transfer sizes on the host; steps compute local lengths on the device.

    Raises
    ------
    InvalidArgument
        `seq_len` is below 0, `world` or `interleave` is below 1, or `rank` is not from 0 to
        ``world - 1``.
    """
    check_at_least(0, seq_len=seq_len)
    check_at_least(1, interleave=interleave)
    check_rank(world, rank)
    rounds, left = divmod(seq_len, world * interleave)
    return rounds * interleave + min(max(left - rank * interleave, 0), interleave)


def local_config(config: MlaConfig, *, world: int, interleave: int) -> MlaConfig:
    """Return the config of one rank's attention: all queries, each as a row, to its own keys.

    Every rank gets as many heads as rank 0, so that all ranks send the same amount. The outputs of
    surplus heads cost time and are dropped.

    Raises
    ------
    InvalidArgument
        A rank that has only a part of the keys cannot implement the config.
    """
    if config.mask != "causal":
        allowed = "causal; with another mask, queries do not see a prefix of a rank's keys"
        raise InvalidArgument("mask", config.mask, allowed)
    if config.rope is not None:
        allowed = "None; rotate queries and keys at `positions`, which are those of whole rows"
        raise InvalidArgument("rope", config.rope, allowed)
    if config.table_multiple:
        allowed = "0; pass block tables"
        raise InvalidArgument("table_multiple", config.table_multiple, allowed)
    if integer("interleave", interleave) < 1 or config.block_size % interleave:
        allowed = f"a divisor of block_size = {config.block_size}"
        raise InvalidArgument("interleave", interleave, allowed)
    if config.max_query_tokens > MAX_ROWS:
        allowed = f"1 to {MAX_ROWS}, since every token is a row on each rank"
        raise InvalidArgument("max_query_tokens", config.max_query_tokens, allowed)
    num_heads = world * len(heads_of_rank(config.num_heads, world, 0))
    if num_heads > MAX_HEADS:
        allowed = f"1 to {MAX_HEADS // world * world}, as all {world} ranks send equally many heads"
        raise InvalidArgument("num_heads", config.num_heads, allowed)
    longest = local_len(config.max_model_len, world=world, rank=0, interleave=interleave)
    return replace(
        config,
        num_heads=num_heads,
        max_rows=config.max_query_tokens,
        max_model_len=longest,
        lse_base="e",
    )
