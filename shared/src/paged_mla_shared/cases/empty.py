"""Cases of padded rows and tokens, and of rows without queries (S-2, S-6)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, TableTail, in_group

GROUP = "empty"
PRODUCTION = {"rows": 300, "padding": 512}

_empty = in_group(GROUP, "S-2", "S-6", "S-9", num_heads=6, features=("padding",))

CASES = (
    _empty("first", "padded first row", (Row(0, 1), Row(65, 1), Row(3, 1))),
    _empty("middle", "padded middle row", (Row(65, 1), Row(0, 1), Row(3, 1))),
    _empty("last", "padded last row", (Row(65, 1), Row(3, 1), Row(0, 1))),
    _empty("all-rows", "an idle step with padded rows", (Row(0, 1), Row(0, 1), Row(0, 1))),
    _empty("one-row", "a single padded row", (Row(0, 1),)),
    _empty("many-tokens", "a padded row with several tokens", (Row(0, 5), Row(70, 2), Row(0, 3))),
    _empty(
        "no-queries",
        "rows with keys but without queries",
        (Row(65, 0), Row(65, 1), Row(200, 0), Row(7, 2)),
    ),
    _empty("no-query-anywhere", "rows without tokens", (Row(65, 0), Row(1, 0))),
    _empty("no-rows", "a step without rows and tokens", ()),
    _empty("only-padded-tokens", "padded tokens without any row", (), padded_tokens=4),
    _empty(
        "padded-tokens",
        "more tokens in the step than in its rows",
        (Row(65, 1), Row(3, 2)),
        padded_tokens=6,
    ),
    *(
        _empty(
            f"h{h}-bs{bs}",
            "padded rows and tokens with other head counts and block sizes",
            (Row(0, 2), Row(2 * bs + 1, 3), Row(0, 0), Row(5, 5), Row(0, 1)),
            padded_tokens=3,
            num_heads=h,
            block_size=bs,
        )
        for h, bs in ((1, 1), (20, 16), (40, 48), (128, 256))
    ),
    _empty(
        "300-rows",
        "padded rows among and after many rows, and more padding than tokens",
        tuple(Row(0 if i % 7 == 3 or i > 256 else 3 + i % 70, 1 + i % 3) for i in range(300)),
        padded_tokens=520,
        num_heads=2,
        is_slow=True,
    ),
    *(
        _empty(
            f"table-{tail}",
            "the block table of padded rows contains an engine's fill value",
            (Row(0, 1), Row(66, 1), Row(0, 1)),
            padded_tokens=1,
            table_tail=tail,
        )
        for tail in TableTail
    ),
)
