"""Cases of rotation in the step (S-12)."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

GROUP = "rope"
PRODUCTION = {"keys": 131072, "theta": 1000000.0, "magnitude": 0.2, "tree": 8, "tokens": 600}

YARN = Yarn(factor=40.0, original_max_position=64)


# Neither the quotient of the two magnitudes nor the magnitude of mscale alone is 1.
UNEQUAL = Yarn(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=0.707)


def _rope(
    pairing: RopePairing,
    name: str,
    why: str,
    rows: tuple[Row, ...],
    *,
    theta: float = 10000.0,
    yarn: Yarn | None = None,
    num_heads: int = 6,
    **more: Any,
) -> Case:
    """Return a case of the group; `more` are fields of :class:`Case`."""
    return Case(
        group=GROUP,
        name=f"{pairing}-{name}",
        why=why,
        rules=("S-3", "S-12"),
        rows=rows,
        num_heads=num_heads,
        rope=Rope(pairing, theta=theta, yarn=yarn),
        **more,
    )


CASES = (
    *(
        _rope(pairing, name, why, rows, mask=mask, yarn=YARN if name == "yarn" else None)
        for pairing in RopePairing
        for name, why, rows, mask in (
            ("decode", "the position of a decode token is absolute",
             (Row(1, 1), Row(2, 1), Row(130, 1)), Mask.CAUSAL),
            ("extend", "positions of a chunk start at the cached length",
             (Row(20, 20), Row(100, 9)), Mask.CAUSAL),
            ("tree", "siblings share a position", (Row(70, 8), Row(5, 5)), Mask.TREE),
            ("yarn", "interpolated frequencies", (Row(30, 30), Row(150, 2)), Mask.CAUSAL),
            ("padded", "padded tokens have no position", (Row(0, 2), Row(65, 1)), Mask.CAUSAL),
            ("no-query", "a step without tokens", (Row(65, 0),), Mask.CAUSAL),
            ("non-causal", "a query at position 0 that sees several keys",
             (Row(9, 9), Row(70, 5)), Mask.NON_CAUSAL),
        )
    ),
    *(
        _rope(pairing, f"theta-{theta:g}", "the base of the rotation is used",
              (Row(40, 9), Row(700, 2)), theta=theta)
        for pairing, theta in ((RopePairing.INTERLEAVED, 5e4), (RopePairing.NEOX, 1e6))
    ),
    *(
        _rope(pairing, "yarn-unequal", "the magnitude is the quotient of two magnitudes",
              (Row(40, 9), Row(5000, 3)), yarn=UNEQUAL, num_heads=2)
        for pairing in RopePairing
    ),
    *(
        _rope(pairing, f"yarn-{name}", "YaRN's ramp with other parameters",
              (Row(30, 30), Row(2100, 2)), theta=theta, yarn=yarn, num_heads=2)
        for pairing, (name, theta, yarn) in zip(
            (*RopePairing, *RopePairing, *RopePairing),
            (
                ("wide", 10000.0, Yarn(factor=4.0, original_max_position=131072)),
                ("narrow", 10000.0, Yarn(factor=16.0, original_max_position=16)),
                ("fast", 10000.0, Yarn(8.0, 4096, beta_fast=8.0, beta_slow=4.0)),
                ("base", 1e6, Yarn(factor=40.0, original_max_position=32768)),
                ("mscale", 10000.0, Yarn(40.0, 4096, mscale=0.5, mscale_all_dim=0.0)),
                ("none", 5e4, Yarn(factor=1.0, original_max_position=4096, mscale=0.7)),
            ),
            strict=True,
        )
    ),
    *(
        _rope(pairing, f"tree-{spelling}", "positions follow depth in every layout of a mask",
              (Row(70, 8), Row(0, 1), Row(5, 5)), mask=Mask.TREE, mask_spelling=spelling,
              num_heads=2)
        for spelling in (MaskSpelling.FULL, MaskSpelling.PACKED)
        for pairing in RopePairing
    ),
    _rope(RopePairing.NEOX, "padded-tokens", "padding does not change the rotation of tokens",
          (Row(0, 3), Row(70, 5), Row(9, 9)), padded_tokens=6),
    _rope(RopePairing.INTERLEAVED, "strided", "rotation of views", (Row(70, 5), Row(9, 9)),
          strided_inputs=True),
    *(
        _rope(pairing, "wide-tree", "positions follow depth in wide trees",
              (Row(130, 64), Row(50, 33)), mask=Mask.TREE, theta=5e4, num_heads=2)
        for pairing in RopePairing
    ),
    *(
        _rope(pairing, f"h{h}-bs{bs}", "other head counts and block sizes",
              (Row(70, 5), Row(300, 1)), num_heads=h, block_size=bs)
        for pairing, h, bs in zip((*RopePairing, *RopePairing), (20, 128, 3, 40), (1, 16, 48, 256),
                                  strict=True)
    ),
    _rope(RopePairing.NEOX, "steps", "positions are computed in every step",
          (Row(70, 5), Row(9, 9)), num_heads=2, then=((Row(300, 5), Row(40, 9)), (Row(3, 1),))),
    _rope(RopePairing.NEOX, "deep-tree", "positions follow depth in a deep tree", (Row(130, 40),),
          mask=Mask.TREE, tree=Tree.CHAIN, num_heads=2),
    _rope(RopePairing.INTERLEAVED, "131072", "positions up to 2^17",
          (Row(131072, 2), Row(4097, 1)), num_heads=1, is_slow=True),
    _rope(RopePairing.INTERLEAVED, "163840", "the longest context of DeepSeek-V3",
          (Row(163840, 1),), num_heads=1, is_large=True),
    _rope(RopePairing.NEOX, "yarn-33k", "positions above 2^15, far beyond the original context",
          (Row(33001, 1), Row(900, 600)), theta=5e4, yarn=UNEQUAL, num_heads=1),
)  # fmt: skip
