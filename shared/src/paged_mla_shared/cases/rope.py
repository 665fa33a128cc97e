"""Rotation inside the step (S-12)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.problem import Mask, Rope, RopePairing, Yarn

GROUP = "rope"

YARN = Yarn(factor=40.0, original_max_position=64)


def _rope(pairing: RopePairing, name: str, why: str, rows: tuple[Row, ...], mask: Mask) -> Case:
    yarn = YARN if name == "yarn" else None
    return Case(
        group=GROUP,
        name=f"{pairing}-{name}",
        why=why,
        rules=("S-3", "S-12"),
        rows=rows,
        num_heads=6,
        mask=mask,
        rope=Rope(pairing, yarn=yarn),
    )


CASES = tuple(
    _rope(pairing, name, why, rows, mask)
    for pairing in RopePairing
    for name, why, rows, mask in (
        ("decode", "the position of a decode token is absolute",
         (Row(1, 1), Row(2, 1), Row(130, 1)), Mask.CAUSAL),
        ("extend", "positions of a chunk start at the cached length",
         (Row(20, 20), Row(100, 9)), Mask.CAUSAL),
        ("tree", "siblings share a position", (Row(70, 8), Row(5, 5)), Mask.TREE),
        ("yarn", "interpolated frequencies", (Row(30, 30), Row(150, 2)), Mask.CAUSAL),
        ("padded", "padded tokens have no position", (Row(0, 2), Row(65, 1)), Mask.CAUSAL),
    )
)  # fmt: skip
