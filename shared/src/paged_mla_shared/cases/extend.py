"""Cases of many query tokens per row: prompts, continued chunks and prefix hits."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group

GROUP = "extend"
PRODUCTION = {"keys": 33000, "queries": 600, "rows": 300, "pairs": 16384, "heads": 128}

_extend = in_group(GROUP, "S-2", "S-4", "S-5", "S-7", "S-9")

CASES = (
    *(
        _extend(f"fresh-q{q}", "a whole prompt without context", (Row(q, q),), num_heads=6)
        for q in (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 130)
    ),
    _extend("fresh-q256", "a prompt of several query tiles", (Row(256, 256),), num_heads=16),
    *(
        _extend(
            f"continue-ctx{context}-q{q}",
            "a chunk that starts at a block edge, or one token before or after it",
            (Row(context + q, q),),
            num_heads=4,
        )
        for context in (63, 64, 65)
        for q in (1, 7, 64)
    ),
    _extend("long-prefix-tiny-chunk", "a context that is longer than the chunk", (Row(1007, 7),)),
    _extend(
        "shared-prefix",
        "two rows that read the same physical blocks",
        (Row(150, 20), Row(140, 12, shares_prefix_of=0)),
        num_heads=8,
    ),
    _extend(
        "full-heads",
        "all heads of the model, with rows of different lengths",
        (Row(40, 40), Row(90, 20), Row(130, 3)),
    ),
    *(
        _extend(
            f"bs{bs}",
            "causal bottom-right alignment at this block size",
            (Row(bs + 5, 5), Row(2 * bs + 1, min(bs + 1, 40))),
            num_heads=3,
            block_size=bs,
            fixed=("block_size",),
        )
        for bs in (1, 16, 32, 128, 256)
    ),
    _extend(
        "600-queries",
        "a long chunk after a long context, and a short row",
        (Row(3, 2), Row(2696, 600)),
        num_heads=1,
    ),
    _extend(
        "33k-keys",
        "a few queries after a context of more than 2^15 keys",
        (Row(33003, 7), Row(70, 9)),
        num_heads=1,
    ),
    *(
        _extend(
            f"h{h}-q{q}",
            "several rows in which the pairs of query and head do not fill tiles",
            (Row(70 + q, q), Row(q, q), Row(130, q)),
            num_heads=h,
        )
        for h, q in ((3, 5), (5, 6), (6, 11), (12, 7), (20, 3), (24, 5), (40, 3), (96, 2))
    ),
    *(
        _extend(
            f"bs{bs}",
            "chunks with block sizes that are not powers of two",
            (Row(bs + 5, 5), Row(7 * bs + 1, min(2 * bs + 1, 40))),
            num_heads=2,
            block_size=bs,
        )
        for bs in (3, 48)
    ),
    *(
        _extend(
            f"scores-{name}",
            "masked keys together with very large or small scores",
            (Row(70, 20), Row(9, 9), Row(4, 4), Row(3, 2)),
            num_heads=5,
            query_scale=query_scale,
            softmax_scale=scale,
        )
        for name, query_scale, scale in (
            ("large", 1e3, None),
            ("past-a-sentinel", 1e4, 1.0),
            ("tiny", 1e-3, None),
        )
    ),
    _extend(
        "spare-capacity",
        "capacities far larger than the step",
        (Row(40, 9), Row(200, 2)),
        num_heads=5,
        spare=9,
    ),
    *(
        _extend(
            f"softmax-scale-{scale:g}",
            "the softmax scale is used as given, also by rows of many queries",
            (Row(200, 130), Row(40, 9), Row(300, 3)),
            num_heads=3,
            query_scale=0.1 / scale,
            softmax_scale=scale,
        )
        for scale in (0.02, 3.0)
    ),
    _extend(
        "prefix-of-many",
        "most rows share a prefix; one row does not",
        (
            Row(300, 2),
            *(Row(200 + 7 * i, 1 + i % 3, shares_prefix_of=0) for i in range(9)),
            Row(250, 2),
        ),
        num_heads=3,
    ),
    _extend(
        "many-pairs", "more than 16384 pairs of token and head", (Row(140, 130),), num_heads=128
    ),
    _extend(
        "300-short-chunks",
        "more than 256 rows of one to five tokens after a context",
        tuple(Row(6 + i % 50, 1 + i % 5) for i in range(300)),
        num_heads=2,
        is_slow=True,
    ),
    _extend(
        "prefix-of-all",
        "many rows that all share a prefix of hundreds of tokens",
        (Row(300, 1), *(Row(270 + 3 * i, 1, shares_prefix_of=0) for i in range(8))),
        num_heads=2,
    ),
    *(
        _extend(
            f"{most + 1}-rows",
            f"more than {most} rows",
            tuple(Row(3, 1) for _ in range(most + 1)),
            num_heads=1,
            is_slow=True,
        )
        for most in (512, 1024)
    ),
    _extend(
        "fresh-q1030",
        "a row of more than 1024 queries",
        (Row(1030, 1030),),
        num_heads=1,
        is_large=True,
    ),
    _extend(
        "fresh-q2050",
        "more than 2048 tokens in a step",
        (Row(2050, 2050),),
        num_heads=1,
        is_large=True,
    ),
)
