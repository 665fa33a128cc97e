"""Cases of prefill: attention over keys and values of every head, on ragged rows (S-21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.dims import DEEPSEEK_V3, GLM_4_7_FLASH, MlaDims
from paged_mla_shared.problem import Problem

GROUP = "prefill"
PRODUCTION = {"keys": 8192, "queries": 600, "rows": 300, "heads": 128, "tokens": 2048}


@dataclass(frozen=True, kw_only=True)
class PrefillCase(Case):
    """A case without a cache; a row's ``seq_len`` counts its keys, and may be below ``query_len``.

    Parameters
    ----------
    dims : MlaDims or None
        The head dims; ``None`` uses the run's dims.
    causal : bool
    workspace : int
        If it is above 0, the case also runs in parts, which must give the same outputs: the
        contexts in chunks of so many keys over all rows, then the remaining keys.
    """

    dims: MlaDims | None = None
    causal: bool = True
    workspace: int = 0

    @property
    def required_features(self) -> tuple[str, ...]:
        """The features that a backend must declare; rows without keys in a part are padding."""
        in_parts = ("padding", "replay") if self.workspace else ()
        return tuple(sorted({*super().required_features, *in_parts}))

    def problem(self, dims: MlaDims, dtype: str) -> Problem:
        """Return the static problem, with the case's own dims if it has them."""
        return super().problem(self.dims or dims, dtype)


def _prefill(name: str, why: str, *rows: tuple[int, int], **more: Any) -> PrefillCase:
    """Return a case whose rows are pairs of keys and queries; `more` are fields of the case."""
    return PrefillCase(
        group=GROUP,
        name=name,
        why=why,
        rows=tuple(Row(keys, queries) for keys, queries in rows),
        **{"rules": ("S-4", "S-5", "S-7", "S-9", "S-21"), "num_heads": 2, **more},
    )


_TILES = (63, 64, 65, 127, 128, 129)  # around the edges of common tiles
_KEY_TILES = (*_TILES, *(n + d for n in (80, 96, 112, 160, 176, 192, 256) for d in (-1, 0, 1)))
_MODELS = {"v3": DEEPSEEK_V3, "glm": GLM_4_7_FLASH}
_RAGGED = ((50, 50), (1, 1), (90, 90), (17, 17), (64, 64), (33, 33), (5, 5))

CASES = (
    *(_prefill(f"q{n}", "rows that end at the edge of a tile", (n, n)) for n in _TILES),
    _prefill(
        "edges-of-keys",
        "keys that end at the edge of a tile, with queries that do not",
        *((n, 3) for n in _KEY_TILES),
    ),
    _prefill(
        "edges-of-keys-whole",
        "keys that end at the edge of a tile and are all visible, as in a context chunk",
        *((n, 3) for n in _KEY_TILES),
        num_heads=1,
        causal=False,
        strided_inputs=True,
    ),
    _prefill(
        "edges-of-contexts",
        "the causal diagonal begins at different places in a key tile",
        *((n + 66, 66) for n in (1, *_KEY_TILES)),
        num_heads=1,
    ),
    *(
        _prefill(
            f"{name}-ragged",
            "head dims of a model, with rows of different lengths",
            *rows,
            dims=dims,
        )
        for name, dims in _MODELS.items()
        for rows in [((65, 65), (3, 3), (130, 20), (1, 1))]
    ),
    *(
        _prefill(
            f"{name}-chunk",
            "chunks after their contexts, with head dims of a model",
            (200, 9),
            (70, 70),
            (129, 1),
            dims=dims,
            strided_inputs=True,
            causal=causal,
        )
        for name, dims, causal in (
            ("v3", DEEPSEEK_V3, True),
            ("v3-whole", DEEPSEEK_V3, False),
            ("glm", GLM_4_7_FLASH, True),
        )
    ),
    _prefill("ragged", "short rows of many lengths", *_RAGGED, num_heads=3),
    _prefill(
        "ragged-whole",
        "short rows of many lengths, in which each query sees its whole row",
        *_RAGGED,
        causal=False,
    ),
    _prefill(
        "1000", "a long row together with short rows", (1000, 260), (1, 1), (300, 300), num_heads=1
    ),
    _prefill(
        "1100",
        "a row of more than 1024 keys and 300 queries, and a short row",
        (1100, 310),
        (5, 5),
        num_heads=1,
    ),
    _prefill(
        "8k",
        "a chunk of a long prompt, and a whole prompt",
        (8200, 600),
        (2100, 2100),
        num_heads=1,
        is_large=True,
    ),
    _prefill(
        "300-rows",
        "offsets of many rows",
        *((1 + i % 7, 1 + i % 3 % (1 + i % 7)) for i in range(300)),
        num_heads=1,
        is_slow=True,
    ),
    *(
        _prefill(
            f"h{h}",
            "head counts that are not multiples of a tile",
            (70, 9),
            num_heads=h,
            fixed=("num_heads",),
        )
        for h in (1, 5, 128)
    ),
    _prefill(
        "one-query",
        "a single query over many keys, as in decode",
        *((n, 1) for n in (1, 2, 64, 65, 300)),
    ),
    _prefill(
        "whole-chunks",
        "context chunks without the queries' own keys",
        (64, 7),
        (129, 70),
        (5, 90),
        causal=False,
    ),
    *(
        _prefill(
            f"empty-{name}",
            "rows without queries, whose keys are poisoned, and rows without keys",
            (0, 5),
            (70, 0),
            (66, 66),
            (0, 0),
            (70, 0),
            (3, 1),
            (0, 65),
            (64, 0),
            causal=causal,
            padded_tokens=3,
            rules=("S-6", "S-9", "S-21"),
        )
        for name, causal in (("causal", True), ("whole", False))
    ),
    _prefill(
        "all-empty",
        "a context chunk in which no row has keys",
        (0, 3),
        (0, 70),
        causal=False,
        rules=("S-6", "S-9", "S-21"),
    ),
    _prefill(
        "no-row", "a step that is only padding", padded_tokens=5, rules=("S-6", "S-9", "S-21")
    ),
    _prefill(
        "more-queries",
        "rows with more queries than keys, whose first queries see no keys",
        (3, 5),
        (64, 70),
        (1, 130),
        (65, 129),
        rules=("S-4", "S-6", "S-21"),
    ),
    _prefill(
        "padding",
        "padded queries get an empty output",
        (9, 9),
        (70, 3),
        padded_tokens=67,
        rules=("S-6", "S-9", "S-21"),
    ),
    _prefill(
        "halves",
        "k_nope and v are halves of one projection, with rows without queries between them",
        (70, 9),
        (65, 0),
        (33, 33),
        num_heads=3,
        strided_inputs=True,
        padded_tokens=2,
    ),
    _prefill("high-scores", "scores in the hundreds", (130, 66), (5, 5), query_scale=60.0),
    _prefill("flat-scores", "nearly equal weights", (130, 66), (5, 5), query_scale=1e-3),
    _prefill(
        "scale",
        "the softmax scale is the problem's, not one derived from the dims",
        (70, 9),
        (33, 33),
        softmax_scale=0.21,
    ),
    _prefill(
        "again",
        "steps with longer, shorter and other rows on one runner",
        (70, 9),
        (3, 3),
        then=(
            (Row(200, 130), Row(1, 1)),
            (Row(0, 2), Row(5, 5), Row(64, 1)),
            (Row(70, 9), Row(3, 3)),
        ),
        spare=3,
    ),
    _prefill(
        "prefix-1000",
        "a prefix hit and 7 new tokens, in one part and in chunks",
        (1007, 7),
        workspace=256,
    ),
    *(
        _prefill(
            f"chunks-of-{workspace}",
            "rows with and without a context, whose chunks end at different places",
            (130, 3),
            (9, 9),
            (64, 1),
            (0, 4),
            (200, 70),
            (33, 33),
            (71, 7),
            workspace=workspace,
            rules=("S-7", "S-8", "S-21"),
        )
        for workspace in (64, 100, 1000)
    ),
    _prefill(
        "chunks-many-rows",
        "many rows, every third of which has a context",
        *((5 + 40 * (i % 3 == 0), 5) for i in range(24)),
        num_heads=1,
        workspace=97,
        rules=("S-7", "S-8", "S-21"),
    ),
    _prefill(
        "padded-again",
        "padded queries do not keep the output of an earlier step",
        (9, 9),
        then=((Row(3, 3),),),
        padded_tokens=2,
        spare=2,
        rules=("S-6", "S-17", "S-21"),
    ),
    _prefill(
        "scores-past-a-sentinel",
        "a row whose scores are all below -5e4 is not a masked row",
        *[(1, 1)] * 5,
        (2, 2),
        query_scale=1e4,
        softmax_scale=10.0,
    ),
    _prefill("513-rows", "more than 512 rows", *[(2, 2)] * 513, num_heads=1, is_large=True),
    _prefill("4100", "more than 4096 queries", (4100, 4100), num_heads=1, is_large=True),
    _prefill(
        "65600-keys", "more than 2^16 keys in a row", (65600, 1), (3, 1), num_heads=1, is_large=True
    ),
    _prefill(
        "70000-keys-of-two",
        "more than 2^16 keys in all rows together",
        (40000, 1),
        (30000, 1),
        num_heads=1,
        is_large=True,
    ),
)
