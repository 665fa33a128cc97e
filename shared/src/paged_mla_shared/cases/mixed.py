"""Cases of prompts, continued chunks, decode rows and padding in one step, in many orders."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group

GROUP = "mixed"
PRODUCTION = {"keys": 33000, "queries": 600, "rows": 300, "tokens": 800}

FRESH = Row(37, 37)
CONTINUE_ONE = Row(65, 1)
CONTINUE_MANY = Row(100, 23)
DECODE = Row(129, 1)
PADDED = Row(0, 0)

_KINDS = (FRESH, CONTINUE_ONE, CONTINUE_MANY, DECODE, PADDED)

_mixed = in_group(GROUP, "S-2", "S-3", "S-4", "S-6", num_heads=5)

CASES = (
    *(
        _mixed(f"rotation{i}", "any order of the kinds of rows", (*_KINDS[i:], *_KINDS[:i]))
        for i in range(len(_KINDS))
    ),
    _mixed("reversed", "any order of the kinds of rows", _KINDS[::-1]),
    _mixed(
        "uniform-short-prompts",
        "short prompts of equal length are not verification rows",
        (Row(4, 4), Row(4, 4), Row(4, 4)),
    ),
    _mixed(
        "decode-beside-prompt",
        "decode rows keep their own key range in a step with a long prompt",
        (Row(200, 1), Row(120, 120), Row(1, 1)),
        num_heads=16,
    ),
    _mixed("padded-tokens", "tokens after the last row", _KINDS, padded_tokens=9),
    *(
        _mixed(
            f"h{h}-bs{bs}",
            "all kinds of rows with other head counts and block sizes",
            _KINDS[::-1],
            num_heads=h,
            block_size=bs,
            padded_tokens=2,
        )
        for h, bs in ((1, 1), (20, 3), (12, 48), (40, 256))
    ),
    _mixed("bs16", "block size below the key tile", _KINDS, block_size=16),
    _mixed(
        "production",
        "a long chunk, long contexts, many decode rows and padding in one step",
        (
            *(Row(5 + i % 60, 1) for i in range(60)),
            Row(1100, 600),
            *(Row(0, 1) for _ in range(90)),
            Row(33001, 1),
            *(Row(2 + i % 60, 1) for i in range(150)),
            Row(4099, 5),
        ),
        num_heads=1,
        padded_tokens=16,
        is_slow=True,
    ),
    _mixed("full-heads", "all heads of the model", (DECODE, CONTINUE_MANY, FRESH), num_heads=None),
)
