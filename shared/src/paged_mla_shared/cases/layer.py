"""Cases of layers: absorbed and materialized rows with the same latents and weights (S-21)."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row, SlotOrder
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

GROUP = "layer"
PRODUCTION = {"keys": 33000, "queries": 600, "rows": 300, "tokens": 1200, "tree": 8, "steps": 3}


def _layer(name: str, why: str, *rows: Row, **more: Any) -> Case:
    fields = {"rules": ("S-21",), "num_heads": 2, **more}
    return Case(group=GROUP, name=name, why=why, rows=rows, **fields)


_ROWS = (Row(70, 3), Row(9, 9), Row(0, 2), Row(33, 1))
_DRAFTS = (Row(70, 5), Row(9, 8), Row(0, 2), Row(33, 1))

CASES = (
    _layer("prompts", "prompts without a context", Row(65, 65), Row(1, 1), Row(33, 33)),
    _layer(
        "mixed", "decode rows together with chunks", Row(130, 1), Row(90, 20), Row(64, 1), Row(7, 7)
    ),
    _layer("prefix-1000", "a prefix hit and 7 new tokens", Row(1007, 7)),
    _layer(
        "edges",
        "contexts and tokens that end at a block edge, or one token before or after it",
        *(Row(context + new, new) for context, new in ((64, 1), (63, 1), (65, 3), (64, 64))),
        num_heads=1,
    ),
    _layer(
        "hits",
        "every third row has a context, and some rows have no queries",
        *(Row(5 + 70 * (i % 3 == 0), 5 * (i % 5 != 4)) for i in range(9)),
        num_heads=1,
        padded_tokens=3,
    ),
    *(
        _layer(
            f"rope-{name}",
            "queries of absorbed and of materialized rows are rotated once by their positions",
            Row(70, 3),
            Row(9, 9),
            rope=rope,
            rules=("S-12", "S-21"),
        )
        for name, rope in (
            ("neox", Rope(RopePairing.NEOX)),
            ("interleaved-yarn", Rope(RopePairing.INTERLEAVED, yarn=Yarn(40.0, 4096))),
        )
    ),
    *(
        _layer(
            f"tree-{spelling}",
            "draft trees, for which all rows are absorbed",
            *_DRAFTS,
            mask=Mask.TREE,
            mask_spelling=spelling,
            rope=Rope(RopePairing.NEOX),
            padded_tokens=3,
            rules=("S-12", "S-14", "S-21"),
        )
        for spelling in MaskSpelling
    ),
    _layer(
        "non-causal",
        "queries that see their whole row; all rows are absorbed",
        *_DRAFTS,
        mask=Mask.NON_CAUSAL,
        rules=("S-4", "S-21"),
    ),
    _layer(
        "non-causal-short",
        "rows with fewer keys than queries, which write only as many tokens as keys",
        *(Row(3, 5), Row(70, 2), Row(1, 3), Row(64, 65)),
        mask=Mask.NON_CAUSAL,
        rules=("S-2", "S-4", "S-21"),
    ),
    _layer(
        "padded",
        "padded rows with queries, between absorbed and materialized rows and at both ends",
        *(Row(0, 3), Row(70, 2), Row(0, 0), Row(0, 1), Row(40, 7), Row(9, 9), Row(0, 4)),
        padded_tokens=5,
        rules=("S-6", "S-9", "S-21"),
    ),
    *(
        _layer(f"bs{size}", "other block sizes", Row(37, 3), Row(20, 20), block_size=size)
        for size in (1, 16, 256)
    ),
    _layer(
        "bs1056",
        "blocks of more than 256 tokens, and a row longer than a block",
        *(Row(1058, 2), Row(270, 3)),
        block_size=1056,
    ),
    _layer(
        "slots",
        "a step with a slot_mapping",
        *_ROWS,
        explicit_slots=True,
        slot_order=SlotOrder.TABLE,
        padded_tokens=2,
        rules=("S-10", "S-21"),
    ),
    _layer(
        "strided",
        "queries, weights, latents, table and cache are views of larger arrays",
        *_ROWS,
        strided_inputs=True,
        token_padding=32,
        block_padding=96,
        rules=("S-9", "S-21"),
    ),
    _layer(
        "h9", "a head count that is not a multiple of a tile", Row(20, 2), Row(3, 3), num_heads=9
    ),
    _layer(
        "again",
        "steps with other rows, more keys and other weights on one runner",
        Row(40, 9),
        Row(3, 3),
        then=((Row(90, 20), Row(0, 2), Row(1, 1)), (Row(5, 5),)),
        spare=2,
        rules=("S-17", "S-21"),
    ),
    _layer(
        "full-heads",
        "all heads of the model, with keys in more than two chunks",
        Row(130, 1),
        Row(66, 5),
        num_heads=None,
    ),
    _layer("long", "a context of several tiles, in chunks", Row(2100, 3), num_heads=1),
    _layer(
        "production",
        "a long context, a long chunk, prompts and many rows, in a cache of over 2^31 elements",
        Row(33001, 1),
        *(Row(2 + i % 60, 1) for i in range(300)),
        Row(1700, 600),
        Row(300, 300),
        cache_elements=2**31 + 2**24,
        is_large=True,
        rules=("S-1", "S-21"),
    ),
    _layer(
        "softmax-scale",
        "the softmax scale is the problem's, not one derived from the dims",
        *_ROWS,
        softmax_scale=0.21,
    ),
    _layer(
        "cache-scale",
        "the layer's scale is used by absorbed and materialized rows, if the format has one",
        *_ROWS,
        cache_scale=0.03,
        rules=("S-11", "S-21"),
    ),
    _layer(
        "rope-theta-50000-5001-keys",
        "absorbed and materialized rows use the rope's parameters, at positions above 4096",
        Row(5001, 3),
        Row(9, 9),
        rope=Rope(RopePairing.NEOX, theta=5e4),
        num_heads=1,
        rules=("S-12", "S-21"),
    ),
    _layer(
        "scores-large",
        "partial results are merged by differences of lse",
        Row(140, 3),
        Row(90, 9),
        softmax_scale=8.0,
    ),
    _layer(
        "scores-past-a-sentinel",
        "a row whose scores are all below -5e4 is not a masked row, absorbed or materialized",
        *[Row(1, 1)] * 5,
        Row(2, 2),
        query_scale=1e4,
        softmax_scale=10.0,
        rules=("S-6", "S-21"),
    ),
    _layer(
        "shared",
        "rows that share blocks, each materialized with all its keys",
        Row(150, 5),
        Row(140, 8, shares_prefix_of=0),
        rules=("S-9", "S-21"),
    ),
    _layer(
        "padded-again",
        "padded tokens do not keep the output of an earlier step",
        Row(9, 9),
        then=((Row(3, 3),),),
        padded_tokens=2,
        spare=2,
        rules=("S-6", "S-17", "S-21"),
    ),
    _layer(
        "trees-again",
        "another tree of the same shape",
        Row(70, 8),
        then=((Row(70, 8),),),
        mask=Mask.TREE,
        rules=("S-14", "S-17", "S-21"),
    ),
)
