"""Cases of 8-bit queries, whose codes and scales are exact (S-11)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.cases.formats import SMALL_TOKENS
from paged_mla_shared.cases.rope import UNEQUAL
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

GROUP = "queries"
PRODUCTION = {"tokens": 600, "heads": 128, "pairs": 16384, "tree": 8}


@dataclass(frozen=True, kw_only=True)
class QueryCase(Case):
    """A case whose queries are quantized.

    `uneven`, `token_scales` and `odd_values` also apply to queries.

    Parameters
    ----------
    scale : float or None
        The scale of all queries of the first step; each further step has twice the scale of the
        step before. ``None`` computes a scale from the data for each token and head.
    query_key_scale : float
        A factor of ``q_pe`` in addition to `query_scale`.
    """

    scale: float | None = None
    query_key_scale: float = 1.0

    @property
    def scales(self) -> tuple[float | None, ...]:
        """The scale of each step; ``None`` for scales that are computed from the data."""
        steps = range(len(self.steps))
        return tuple(None if self.scale is None else self.scale * 2.0**step for step in steps)


_RULES = {"rope": "S-12", "then": "S-17"}  # additional rules of cases that set these fields
_ROWS = (Row(37, 5), Row(0, 1), Row(75, 3), Row(100, 1))


def _queries(name: str, why: str, rows: tuple[Row, ...] = _ROWS, **more: Any) -> QueryCase:
    """Return a case of the group; `more` are fields of :class:`QueryCase`."""
    return QueryCase(
        group=GROUP,
        name=name,
        why=why,
        rules=("S-11", *(rule for field, rule in _RULES.items() if field in more)),
        rows=rows,
        **{"num_heads": 3, "padded_tokens": 2, **more},
    )


CASES = (
    _queries("from-data", "each token and head has its own scale", uneven=True),
    _queries("scale-0.03", "queries are divided by the given scale, which is returned", scale=0.03),
    _queries(
        "past-448",
        "numbers too large for the scale saturate; they do not become NaN",
        scale=0.002,
        uneven=True,
    ),
    _queries(
        "scale-7",
        "subnormal codes, and numbers halfway between two codes",
        scale=7.0,
        query_scale=1 / 16,
    ),
    *(
        _queries(
            f"odd-values-{name}",
            "NaN and inf become NaN and are ignored when scales are chosen; zeros keep their signs",
            scale=scale,
            odd_values=True,
        )
        for name, scale in (("from-data", None), ("scale-0.5", 0.5))
    ),
    _queries(
        "key-parts-300",
        "the rotated part of a query is used when its scale is chosen",
        query_key_scale=300.0,
    ),
    *(
        _queries(
            f"rope-{name}",
            "queries are rotated, rounded to the model's dtype, then quantized",
            rope=rope,
            scale=scale,
            query_key_scale=0.1,
        )
        for name, rope, scale in (
            ("neox", Rope(RopePairing.NEOX), None),
            ("interleaved-yarn", Rope(RopePairing.INTERLEAVED, yarn=Yarn(40.0, 4096)), 0.03),
        )
    ),
    _queries(
        "small-tokens",
        "the smallest scale is 2^-126, also for zeros; subnormal numbers are not flushed",
        (Row(9, 7), Row(40, 5)),
        token_scales=SMALL_TOKENS,
    ),
    *(
        _queries(
            f"rope-tree-{spelling}",
            "draft tokens are rotated by their depth, not by their index in the step",
            (Row(37, 6), Row(0, 1), Row(75, 9)),
            rope=Rope(pairing),
            mask=Mask.TREE,
            mask_spelling=spelling,
            num_heads=2,
        )
        for spelling, pairing in zip(MaskSpelling, cycle(RopePairing))
    ),
    _queries(
        "rope-non-causal-short",
        "queries before a row's first position are rotated by position 0",
        (Row(3, 5), Row(37, 2), Row(1, 3), Row(0, 1)),
        rope=Rope(RopePairing.INTERLEAVED),
        mask=Mask.NON_CAUSAL,
        num_heads=2,
    ),
    _queries("strided", "queries that are views with gaps", strided_inputs=True, uneven=True),
    *(
        _queries(
            f"two-steps-{name}",
            "no data of an earlier step is used in the next, including its scale and positions",
            (Row(37, 3), Row(75, 2), Row(0, 1)),
            then=((Row(0, 1), Row(90, 2), Row(12, 3)),),
            rope=Rope(RopePairing.NEOX),
            query_key_scale=0.1,
            scale=scale,
        )
        for name, scale in (("from-data", None), ("scale-0.03", 0.03))
    ),
    _queries("h128", "all heads of a model", (Row(9, 2), Row(5, 1)), num_heads=128),
    _queries("600-tokens", "the tokens of a prompt", (Row(600, 600),), num_heads=1, uneven=True),
    _queries(
        "1100-pairs",
        "more than 1024 pairs of token and head",
        (Row(110, 110),),
        num_heads=10,
        uneven=True,
    ),
    _queries(
        "600-tokens-h128",
        "the tokens of a prompt, with all heads",
        (Row(700, 600), Row(9, 2)),
        num_heads=128,
        uneven=True,
        is_large=True,
    ),
    _queries(
        "rope-theta-50000-yarn",
        "queries use all parameters of the rope",
        (Row(40, 2), Row(9, 9)),
        rope=Rope(RopePairing.NEOX, theta=5e4, yarn=UNEQUAL),
    ),
    _queries(
        "rope-5001-keys",
        "positions that bfloat16 cannot represent exactly",
        (Row(5001, 1), Row(700, 2)),
        rope=Rope(RopePairing.INTERLEAVED),
    ),
    _queries(
        "rope-tree-of-40",
        "depths beyond the first 32-bit word of a mask",
        (Row(70, 40),),
        rope=Rope(RopePairing.NEOX),
        mask=Mask.TREE,
        tree=Tree.CHAIN,
        num_heads=1,
    ),
    _queries("no-tokens", "a step without queries", (Row(70, 0),), padded_tokens=0),
)
