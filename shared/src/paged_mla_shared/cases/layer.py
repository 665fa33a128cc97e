"""Steps that are asked absorbed and materialised, from the same latents and weights (S-21)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row

GROUP = "layer"


def _layer(name: str, why: str, *rows: Row) -> Case:
    return Case(group=GROUP, name=name, why=why, rules=("S-21",), rows=rows, num_heads=2)


CASES = (
    _layer("prompts", "prompts without context", Row(65, 65), Row(1, 1), Row(33, 33)),
    _layer("mixed", "decode rows beside chunks", Row(130, 1), Row(90, 20), Row(64, 1), Row(7, 7)),
    _layer("prefix-1000", "a prefix hit and 7 new tokens", Row(1007, 7)),
)
