"""The heads of a rank."""

from __future__ import annotations

from paged_mla_optimized.config.arguments import check_rank, integer
from paged_mla_shared.errors import InvalidArgument


def heads_of_rank(num_heads: int, world: int, rank: int) -> range:
    """Return the heads of one rank, which are consecutive; the first ranks may have one more.

    Parameters
    ----------
    num_heads : int
        H, the heads of all ranks together, >= `world`.
    world : int
        Number of ranks, >= 1.
    rank : int
        0 to ``world - 1``.

    Raises
    ------
    InvalidArgument
        `num_heads` is less than `world`, or `rank` is outside its range.
    """
    check_rank(world, rank)
    if integer("num_heads", num_heads) < world:
        raise InvalidArgument("num_heads", num_heads, f"at least one for each of {world} ranks")
    each, more = divmod(num_heads, world)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
