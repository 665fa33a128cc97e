"""Which heads a rank has."""

from __future__ import annotations

from paged_mla_optimized.config.arguments import check_rank, integer
from paged_mla_shared.errors import InvalidArgument


def heads_of_rank(num_heads: int, world: int, rank: int) -> range:
    """Return the heads of one rank: neighbours, and one more on the first ranks if need be.

    Parameters
    ----------
    num_heads : int
        H of all ranks together, >= `world`.
    world : int
        Ranks, >= 1.
    rank : int
        0 to ``world - 1``.

    Raises
    ------
    InvalidArgument
    """
    check_rank(world, rank)
    if integer("num_heads", num_heads) < world:
        raise InvalidArgument("num_heads", num_heads, f"at least one for each of {world} ranks")
    each, more = divmod(num_heads, world)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
