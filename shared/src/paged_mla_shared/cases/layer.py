"""Steps that are asked absorbed and materialised, from the same latents and weights (S-21)."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row

GROUP = "layer"


def _layer(name: str, why: str, *rows: Row, **more: Any) -> Case:
    fields = {"rules": ("S-21",), "num_heads": 2, **more}
    return Case(group=GROUP, name=name, why=why, rows=rows, **fields)


CASES = (
    _layer("prompts", "prompts without context", Row(65, 65), Row(1, 1), Row(33, 33)),
    _layer("mixed", "decode rows beside chunks", Row(130, 1), Row(90, 20), Row(64, 1), Row(7, 7)),
    _layer("prefix-1000", "a prefix hit and 7 new tokens", Row(1007, 7)),
    _layer(
        "edges",
        "contexts and tokens that end at the edge of a block, or one off it",
        *(Row(context + new, new) for context, new in ((64, 1), (63, 1), (65, 3), (64, 64))),
        num_heads=1,
    ),
    _layer(
        "hits",
        "every third of many rows has a context, rows without queries among them",
        *(Row(5 + 70 * (i % 3 == 0), 5 * (i % 5 != 4)) for i in range(9)),
        num_heads=1,
        padded_tokens=3,
    ),
    _layer(
        "strided",
        "weights and lengths as views too",
        Row(70, 5),
        Row(33, 33),
        strided_inputs=True,
        token_padding=32,
    ),
)
