"""Many query tokens per row: prompts, continued chunks, prefix hits."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group

GROUP = "extend"
PRODUCTION = {"keys": 33000, "queries": 600, "rows": 300, "pairs": 16384, "heads": 128}

_extend = in_group(GROUP, "S-2", "S-4", "S-5", "S-7", "S-9")

CASES = (
    *(
        _extend(f"fresh-q{q}", "a whole prompt, causal within itself", (Row(q, q),), num_heads=6)
        for q in (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 130)
    ),
    _extend("fresh-q256", "a prompt of several query tiles", (Row(256, 256),), num_heads=16),
    *(
        _extend(
            f"continue-ctx{context}-q{q}",
            "a chunk that starts at a block edge, one before or one after",
            (Row(context + q, q),),
            num_heads=4,
        )
        for context in (63, 64, 65)
        for q in (1, 7, 64)
    ),
    _extend("long-prefix-tiny-chunk", "keys past the chunk's own length", (Row(1007, 7),)),
    _extend(
        "shared-prefix",
        "two rows that read the same physical blocks",
        (Row(150, 20), Row(140, 12, shares_prefix_of=0)),
        num_heads=8,
    ),
    _extend(
        "full-heads",
        "all heads of the model, ragged",
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
        "a long chunk behind a long context, beside a short one",
        (Row(3, 2), Row(2696, 600)),
        num_heads=1,
    ),
    _extend("33k-keys", "a few queries past 2^15 keys", (Row(33003, 7), Row(70, 9)), num_heads=1),
    *(
        _extend(
            f"h{h}-q{q}",
            "heads and queries whose product is no tile multiple, in several rows",
            (Row(70 + q, q), Row(q, q), Row(130, q)),
            num_heads=h,
        )
        for h, q in ((3, 5), (5, 6), (6, 11), (12, 7), (20, 3), (24, 5), (40, 3), (96, 2))
    ),
    *(
        _extend(
            f"bs{bs}",
            "chunks over blocks of no power of two",
            (Row(bs + 5, 5), Row(7 * bs + 1, min(2 * bs + 1, 40))),
            num_heads=2,
            block_size=bs,
        )
        for bs in (3, 48)
    ),
    *(
        _extend(
            f"scores-{name}",
            "keys that a query does not see beside scores of any size",
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
        "an instance far larger than its step",
        (Row(40, 9), Row(200, 2)),
        num_heads=5,
        spare=9,
    ),
    *(
        _extend(
            f"softmax-scale-{scale:g}",
            "the scale is used as it is given, by rows of many queries too",
            (Row(200, 130), Row(40, 9), Row(300, 3)),
            num_heads=3,
            query_scale=0.1 / scale,
            softmax_scale=scale,
        )
        for scale in (0.02, 3.0)
    ),
    _extend(
        "prefix-of-many",
        "most rows share a prefix, one does not",
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
        "rows past 255, each of one to five tokens behind a context",
        tuple(Row(6 + i % 50, 1 + i % 5) for i in range(300)),
        num_heads=2,
        is_slow=True,
    ),
    _extend(
        "prefix-of-all",
        "every row of many shares hundreds of tokens with the others",
        (Row(300, 1), *(Row(270 + 3 * i, 1, shares_prefix_of=0) for i in range(8))),
        num_heads=2,
    ),
    _extend(
        "513-rows",
        "more rows than 512",
        tuple(Row(3, 1) for _ in range(513)),
        num_heads=1,
        is_slow=True,
    ),
    _extend(
        "fresh-q1030",
        "more queries of a row than 1024",
        (Row(1030, 1030),),
        num_heads=1,
        is_large=True,
    ),
    _extend(
        "fresh-q2050",
        "more tokens of a step than 2048",
        (Row(2050, 2050),),
        num_heads=1,
        is_large=True,
    ),
)
