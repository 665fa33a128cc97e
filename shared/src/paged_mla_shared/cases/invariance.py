"""Cases that run again in an equivalent form: the outputs must not change (S-17, S-19, S-20)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group

GROUP = "invariance"
PRODUCTION = {"keys": 2048}

_invariant = in_group(GROUP, "S-17", "S-19", "S-20", num_heads=6, features=("explicit_slots",))

CASES = (
    _invariant("decode", "rows of one token", (Row(65, 1), Row(300, 1), Row(1, 1), Row(128, 1))),
    _invariant("mixed", "rows of every kind", (Row(17, 17), Row(129, 1), Row(100, 9), Row(70, 4))),
    _invariant(
        "2k-keys",
        "a long row together with short rows",
        (Row(65, 1), Row(2200, 3), Row(9, 9)),
        num_heads=1,
    ),
)
