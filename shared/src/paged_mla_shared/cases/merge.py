"""Cases of merges of partial results, some of which are empty or poisoned (S-8)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from paged_mla_shared.problem import Output
from paged_mla_shared.strides import strided

PRODUCTION = {"tokens": 600, "heads": 128, "partials": 130}


class Part(StrEnum):
    """The contents of one partial result."""

    PLAIN = "plain"
    EMPTY = "empty"  # out 0, lse -inf
    EMPTY_NAN = "empty_nan"  # out NaN, lse -inf: memory that was not written
    HOLES = "holes"  # every second query is empty, and its out is NaN
    HIGH = "high"  # lse near +1e4
    LOW = "low"  # lse near -1e4
    TIED = "tied"  # every lse is the same
    SCATTERED = "scattered"  # half of the pairs of token and head are empty, and their out is NaN


@dataclass(frozen=True)
class MergeCase:
    """The partial results of one set of queries.

    Parameters
    ----------
    name, why : str
        The id, and the situation that the case covers.
    parts : tuple of Part
    tokens, num_heads : int
    are_views : bool
        Whether each lse is [num_heads, tokens] in memory, and each out a part of a larger array,
        as kernels with other layouts return them.
    is_large : bool
        Whether the case has production's size. An interpreter, which would need minutes, does not
        run it.
    """

    name: str
    why: str
    parts: tuple[Part, ...]
    tokens: int = 5
    num_heads: int = 3
    are_views: bool = False
    is_large: bool = False

    def build(self, width: int) -> list[Output]:
        """Return the partial results in float32.

        Each has out [tokens, num_heads, width] and lse [tokens, num_heads].
        """
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        shape = (self.tokens, self.num_heads, width)
        partials = [_partial(part, shape, rng) for part in self.parts]
        return [_viewed(partial) for partial in partials] if self.are_views else partials


def _partial(part: Part, shape: tuple[int, int, int], rng: np.random.Generator) -> Output:
    out = rng.standard_normal(shape, dtype=np.float32)
    lse = 3 * rng.standard_normal(shape[:2], dtype=np.float32)
    if part in {Part.HIGH, Part.LOW}:
        lse += np.float32(1e4 if part is Part.HIGH else -1e4)
    if part is Part.TIED:
        lse[:] = np.float32(2.5)
    empty = np.zeros(shape[:2], bool)
    if part in {Part.EMPTY, Part.EMPTY_NAN}:
        empty[:] = True
    if part is Part.HOLES:
        empty[::2] = True
    if part is Part.SCATTERED:
        empty = rng.random(shape[:2]) < 0.5
    lse[empty] = -np.inf
    out[empty] = 0 if part is Part.EMPTY else np.nan
    return Output(out, lse)


def _viewed(partial: Output) -> Output:
    """Return an equal partial result whose arrays are views with other strides."""
    return Output(strided(partial.out), np.ascontiguousarray(partial.lse.T).T)


_P = Part

MERGES = (
    MergeCase("two", "two partial results, as of ordinary splits", (_P.PLAIN, _P.PLAIN)),
    MergeCase("one", "a single partial result is returned unchanged", (_P.PLAIN,)),
    *(
        MergeCase(
            f"one-{part}".replace("_", "-"),
            "a single partial result is merged, not just copied",
            (part,),
        )
        for part in (_P.EMPTY, _P.EMPTY_NAN, _P.HOLES, _P.HIGH, _P.LOW)
    ),
    *(
        MergeCase(f"{n}-splits", "different numbers of splits, some of which are empty", parts[:n])
        for n, parts in (
            (n, (_P.PLAIN, _P.EMPTY_NAN, _P.PLAIN, _P.HOLES) * 8)
            for n in (3, 4, 5, 6, 7, 9, 12, 15, 16, 17, 31, 32)
        )
    ),
    *(
        MergeCase(
            f"only-the-{which}-of-{n}",
            "all partial results but one are empty",
            tuple(_P.PLAIN if i == at else _P.EMPTY_NAN for i in range(n)),
        )
        for which, at, n in (("first", 0, 3), ("second", 1, 3), ("last", 2, 3), ("last", 15, 16))
    ),
    MergeCase(
        "130-splits",
        "more partial results than a GPU has processors",
        (_P.PLAIN, _P.HOLES) * 65,
        2,
        1,
    ),
    MergeCase("33-splits", "more partial results than a warp has lanes", (_P.PLAIN,) * 33),
    MergeCase(
        "600-tokens-h128",
        "more than 2^16 pairs of token and head",
        (_P.SCATTERED, _P.PLAIN),
        tokens=600,
        num_heads=128,
        is_large=True,
    ),
    MergeCase("no-tokens", "a step without queries", (_P.PLAIN, _P.PLAIN), 0),
    MergeCase("600-tokens", "as many tokens as a chunk", (_P.SCATTERED, _P.PLAIN), 600, 2),
    MergeCase("eight", "many splits", (_P.PLAIN,) * 8),
    MergeCase("empty-left", "a prefix chunk without keys", (_P.EMPTY, _P.PLAIN)),
    MergeCase("empty-right", "a suffix without keys", (_P.PLAIN, _P.EMPTY)),
    MergeCase(
        "nan-left", "a partial result that was not written has weight 0", (_P.EMPTY_NAN, _P.PLAIN)
    ),
    MergeCase(
        "nan-right", "a partial result that was not written has weight 0", (_P.PLAIN, _P.EMPTY_NAN)
    ),
    MergeCase(
        "all-empty",
        "if all partial results are empty, the output is (0, -inf)",
        (_P.EMPTY, _P.EMPTY),
    ),
    MergeCase(
        "all-nan",
        "if all partial results are empty, the output is (0, -inf)",
        (_P.EMPTY_NAN, _P.EMPTY_NAN),
    ),
    MergeCase("holes", "alternately empty and other queries", (_P.HOLES, _P.PLAIN, _P.HOLES)),
    MergeCase("holes-only", "queries that are empty in every partial result", (_P.HOLES, _P.HOLES)),
    MergeCase("high", "weights of scores near 1e4", (_P.HIGH, _P.HIGH)),
    MergeCase("low", "weights of scores near -1e4", (_P.LOW, _P.LOW)),
    MergeCase("far-apart", "one partial result has a negligible weight", (_P.HIGH, _P.LOW)),
    *(
        MergeCase(
            f"h{h}",
            "head counts that are not multiples of a tile",
            (_P.PLAIN, _P.HOLES, _P.PLAIN),
            3,
            h,
        )
        for h in (1, 17, 128)
    ),
    MergeCase(
        "views", "arrays with different strides", (_P.PLAIN, _P.HOLES, _P.PLAIN), are_views=True
    ),
    MergeCase(
        "scattered", "heads of a token are empty in different partial results", (_P.SCATTERED,) * 5
    ),
    MergeCase(
        "scattered-and-full",
        "partly empty, empty and full partial results",
        (_P.PLAIN, _P.SCATTERED, _P.EMPTY_NAN, _P.SCATTERED),
    ),
    MergeCase("ties", "several partial results with the largest lse", (_P.TIED, _P.TIED, _P.TIED)),
    MergeCase(
        "ties-above",
        "several largest, a lower and an empty partial result",
        (_P.LOW, _P.TIED, _P.EMPTY_NAN, _P.TIED),
    ),
    MergeCase("far-apart-rising", "the largest lse comes last", (_P.LOW, _P.HIGH)),
    MergeCase(
        "rising-by-far",
        "each lse is far larger than the one before",
        (_P.EMPTY_NAN, _P.LOW, _P.PLAIN, _P.HIGH),
    ),
)
