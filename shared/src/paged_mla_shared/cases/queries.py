"""Queries of 8 bits: codes and scales, byte for byte (S-11)."""

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

    `uneven`, `token_scales` and `odd_values` are of queries too.

    Parameters
    ----------
    scale : float or None
        Of all queries of the first step, each further one has twice as much; ``None`` takes one
        from the data for each token and head.
    query_key_scale : float
        Factor on ``q_pe`` beyond `query_scale`.
    """

    scale: float | None = None
    query_key_scale: float = 1.0

    @property
    def scales(self) -> tuple[float | None, ...]:
        """The scale that each step is given, ``None`` for those from the data."""
        steps = range(len(self.steps))
        return tuple(None if self.scale is None else self.scale * 2.0**step for step in steps)


_RULES = {"rope": "S-12", "then": "S-17"}  # of cases that have such a field
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
    _queries("from-data", "each token and head has a scale of its own", uneven=True),
    _queries("scale-0.03", "a scale that is given divides, and is handed back", scale=0.03),
    _queries(
        "past-448",
        "what is too large for the scale becomes the largest, not NaN",
        scale=0.002,
        uneven=True,
    ),
    _queries("scale-7", "subnormal codes, ties among them", scale=7.0, query_scale=1 / 16),
    *(
        _queries(
            f"odd-values-{name}",
            "what is no number stays none and has no say in scales; zeros keep their signs",
            scale=scale,
            odd_values=True,
        )
        for name, scale in (("from-data", None), ("scale-0.5", 0.5))
    ),
    _queries(
        "key-parts-300",
        "the rotated part of a query has a say in its scale",
        query_key_scale=300.0,
    ),
    *(
        _queries(
            f"rope-{name}",
            "queries are rotated, rounded to the model's type, then quantized",
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
        "no scale has a floor but 2^-126, that of a query of zeros too; subnormal numbers stay",
        (Row(9, 7), Row(40, 5)),
        token_scales=SMALL_TOKENS,
    ),
    *(
        _queries(
            f"rope-tree-{spelling}",
            "drafts are rotated by their depth, not by their place in the step",
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
        "queries in front of a row's first position are rotated at position 0",
        (Row(3, 5), Row(37, 2), Row(1, 3), Row(0, 1)),
        rope=Rope(RopePairing.INTERLEAVED),
        mask=Mask.NON_CAUSAL,
        num_heads=2,
    ),
    _queries("strided", "tokens and heads apart", strided_inputs=True, uneven=True),
    *(
        _queries(
            f"two-steps-{name}",
            "nothing of an earlier step, its scale and positions included, is in the next",
            (Row(37, 3), Row(75, 2), Row(0, 1)),
            then=((Row(0, 1), Row(90, 2), Row(12, 3)),),
            rope=Rope(RopePairing.NEOX),
            query_key_scale=0.1,
            scale=scale,
        )
        for name, scale in (("from-data", None), ("scale-0.03", 0.03))
    ),
    _queries("h128", "heads of a whole model", (Row(9, 2), Row(5, 1)), num_heads=128),
    _queries("600-tokens", "a prompt's tokens", (Row(600, 600),), num_heads=1, uneven=True),
    _queries(
        "1100-pairs",
        "more than 1024 pairs of token and head",
        (Row(110, 110),),
        num_heads=10,
        uneven=True,
    ),
    _queries(
        "600-tokens-h128",
        "a prompt's tokens, each of all heads",
        (Row(700, 600), Row(9, 2)),
        num_heads=128,
        uneven=True,
        is_large=True,
    ),
    _queries(
        "rope-theta-50000-yarn",
        "queries take the rope's own numbers",
        (Row(40, 2), Row(9, 9)),
        rope=Rope(RopePairing.NEOX, theta=5e4, yarn=UNEQUAL),
    ),
    _queries(
        "rope-5001-keys",
        "positions past what 8 bits of a bfloat16 count",
        (Row(5001, 1), Row(700, 2)),
        rope=Rope(RopePairing.INTERLEAVED),
    ),
    _queries(
        "rope-tree-of-40",
        "depths past the first word of a mask",
        (Row(70, 40),),
        rope=Rope(RopePairing.NEOX),
        mask=Mask.TREE,
        tree=Tree.CHAIN,
        num_heads=1,
    ),
    _queries("no-tokens", "a step without queries", (Row(70, 0),), padded_tokens=0),
)
