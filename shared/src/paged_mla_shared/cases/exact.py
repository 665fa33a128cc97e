"""Cases whose output is a value bit for bit, and of rows with few keys (S-22)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, Tree, in_group
from paged_mla_shared.problem import Mask

GROUP = "exact"
PRODUCTION = {"keys": 4096, "heads": 128}  # so many keys that rows have several splits

HEADS = (1, 5, 16, 40, 64, 128)

_exact = in_group(GROUP, "S-5", "S-22")

SINGLE = (
    *(
        _exact(
            f"one-key-h{h}",
            "the weight of a single key is exactly 1, so that no rounding error remains",
            (Row(1, 1),) * 33,
            num_heads=h,
            fixed=("num_heads",),
        )
        for h in HEADS
    ),
    _exact(
        "one-key-beside-many",
        "rows of one key in a step whose work other rows divide",
        (Row(1, 1), Row(1500, 1), Row(1, 1), Row(70, 1), Row(1, 1)),
        num_heads=16,
    ),
    _exact(
        "first-queries",
        "the first query of a prompt sees only its own key",
        (Row(64, 64), Row(3, 3)),
    ),
    _exact(
        "roots",
        "root nodes of draft trees without a context see only themselves",
        (Row(7, 7), Row(5, 5)),
        mask=Mask.TREE,
        tree=Tree.FOREST,
    ),
    _exact(
        "fewer-keys-than-queries",
        "all queries of a non-causal row see its one key",
        (Row(1, 2), Row(1, 5)),
        mask=Mask.NON_CAUSAL,
    ),
    *(
        _exact(
            f"equal-keys-h{h}",
            "equal weights cancel, for any number of splits",
            tuple(Row(n, 1) for n in (2, 3, 63, 64, 65, 129, 1000, 4097)),
            num_heads=h,
            equal_keys=True,
        )
        for h in (1, 16, 128)
    ),
    _exact(
        "equal-keys-of-chunks",
        "each query of a chunk sees equal values, for any number of keys",
        (Row(70, 6), Row(130, 70), Row(4, 4)),
        num_heads=16,
        equal_keys=True,
    ),
)

SHORT = tuple(
    _exact(
        f"short-rows-h{h}",
        "rounding the largest weight adds a small error to every output",
        tuple(Row(n, 1) for n in (2, 3, 4, 8, 16, 33, 64) for _ in range(rows)),
        num_heads=h,
        fixed=fixed,
        is_slow=h < 128,
    )
    # With 24 rows of each length, backends of 4 heads have enough queries; with 4 rows, few have.
    for h, rows, fixed in ((16, 24, ()), (128, 4, ("num_heads",)))
)

CASES = (*SINGLE, *SHORT)
