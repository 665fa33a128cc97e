"""Cases of cache formats with scales (S-11), and the list of cases that run in all formats.

The cases of this group run in the 8-bit formats that a backend declares. Cases in which the layer
has a scale also run in plain formats, which ignore it.
"""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group
from paged_mla_shared.cases.rope import UNEQUAL
from paged_mla_shared.problem import Rope, RopePairing, Yarn

GROUP = "formats"
PRODUCTION = {"keys": 150, "queries": 4, "rows": 128, "heads": 32}

_ROWS = (Row(37, 37), Row(0, 1), Row(75, 3), Row(100, 1))
_DECODE = (Row(150, 1), Row(64, 1), Row(33, 1))

_format = in_group(GROUP, "S-5", "S-10", "S-11", rows=_ROWS, num_heads=2, block_size=16)

# Zero, numbers that a minimum of scales would lose, and a number that is subnormal in float32.
SMALL_TOKENS = (0.0, 1e-3, 1e-6, 1e-12, 1e-30, 1e-40)

CASES = (
    *(
        _format(
            f"scale-{scale:g}",
            "the layer's scale is applied once in writes and once in reads",
            cache_scale=scale,
            block_size=block_size,
        )
        for scale, block_size in ((0.03, 16), (7.0, 64))
    ),
    _format(
        "latents-past-448",
        "numbers too large for the scale saturate; they do not become NaN",
        latent_scale=300.0,
        query_scale=1 / 300,
    ),
    _format(
        "keys-past-448",
        "rotated keys are far larger than latents",
        key_scale=300.0,
        query_scale=0.01,
    ),
    _format(
        "latents-0.001",
        "scales can be far below 1",
        latent_scale=1e-3,
        key_scale=1e-3,
        query_scale=1e3,
        cache_scale=1e-5,
    ),
    *(
        _format(
            f"ties-{scale:g}",
            "numbers halfway between two codes after the division are rounded to even",
            coarse=True,
            cache_scale=scale,
        )
        for scale in (2.0, 7.0)
    ),
    _format(
        "equal-scores",
        "equal weights are rounded in the same direction, which must not change the lse",
        (Row(256, 1), Row(64, 1), Row(129, 1), Row(100, 1)),
        query_scale=1e-3,
        block_size=64,
        num_heads=16,
    ),
    _format("uneven", "each token, quarter and group has a different scale", uneven=True),
    _format(
        "uneven-bs64",
        "scales are found by block id, also if blocks have gaps between them",
        (Row(150, 20), Row(129, 1), Row(64, 64)),
        uneven=True,
        block_size=64,
        block_padding=64,
    ),
    _format(
        "powers-of-two",
        "cached scales that are powers of two are read together with other scales",
        uneven=True,
        powers_of_two=True,
    ),
    *(
        _format(
            f"groups-of-{bs // 4}",
            "appends that begin and end anywhere in a group, with larger or smaller tokens",
            tuple(Row(bs + i + 1 + i % 4, 1 + i % 4) for i in range(min(bs, 20))),
            uneven=True,
            block_size=bs,
            num_heads=1,
        )
        for bs in (4, 16, 64)
    ),
    _format(
        "grown-group",
        "one token joins another in its group",
        (Row(6, 2), Row(4, 1)),
        uneven=True,
        block_size=8,
        num_heads=1,
    ),
    _format(
        "prefix-hits",
        "rows that read the same blocks read the same scales",
        (Row(75, 3), *(Row(40 + 9 * i, 2, shares_prefix_of=0) for i in range(4)), Row(5, 5)),
        uneven=True,
    ),
    _format(
        "again",
        "reused blocks get the scales of their new tokens",
        (Row(100, 2), Row(33, 1)),
        then=((Row(120, 3), Row(9, 9)), (Row(100, 2), Row(33, 1))),
        uneven=True,
    ),
    _format(
        "128-rows-of-2",
        "scales of many rows of two tokens",
        tuple(Row(2 + i % 15, 2) for i in range(128)),
        uneven=True,
        num_heads=1,
        is_slow=True,
    ),
    *(
        _format(
            f"h32-q{q}",
            "heads and drafts of a served model",
            (Row(64 + q, q), Row(33, q)),
            num_heads=32,
            uneven=True,
        )
        for q in (1, 4)
    ),
    *(
        _format(
            f"small-quarter-q{q}",
            "a quarter of a latent that is a millionth of the others keeps its precision",
            (Row(64 + q, q), Row(33, q)),
            num_heads=32,
            latent_scale=2.0**10,
            key_scale=2.0**10,
            query_scale=2.0**-10,
            quarters=(1.0, 2.0**-20, 1.0, 1.0),
        )
        for q in (1, 4)
    ),
    _format(
        "rope-neox",
        "keys are rotated, rounded to the model's dtype, then quantized",
        rope=Rope(RopePairing.NEOX),
        latent_scale=8.0,
        query_scale=0.1,
    ),
    _format(
        "rope-interleaved-yarn",
        "keys are rotated, rounded to the model's dtype, then quantized",
        rope=Rope(RopePairing.INTERLEAVED, yarn=Yarn(40.0, 4096)),
        latent_scale=8.0,
        query_scale=0.1,
        cache_scale=0.2,
    ),
    *(
        _format(f"decode-{name}", f"{why}; one token a row", _DECODE, num_heads=16, **more)
        for name, why, more in (
            (
                "scale-0.03",
                "the layer's scale is applied once to scores and once to outputs",
                {"cache_scale": 0.03},
            ),
            (
                "scale-7",
                "the layer's scale is applied once to scores and once to outputs",
                {"cache_scale": 7.0},
            ),
            (
                "latents-0.001",
                "queries above 448 and weights above 1 need scales if they are rounded to 8 bits",
                {
                    "latent_scale": 1e-3,
                    "key_scale": 1e-3,
                    "query_scale": 1e3,
                    "cache_scale": 1e-5,
                },
            ),
            (
                "keys-past-448",
                "small queries need a scale if they are rounded to 8 bits",
                {"key_scale": 300.0, "query_scale": 0.01},
            ),
        )
    ),
    *(
        _format(
            f"small-tokens-bs{bs}",
            "the smallest scale is 2^-126, also for zeros; subnormal numbers are not flushed",
            (Row(24, 24), Row(32, 8), Row(9, 1)),
            token_scales=tuple(scale for scale in SMALL_TOKENS for _ in range(bs // 4)),
            block_size=bs,
            num_heads=1,
        )
        for bs in (4, 16)
    ),
    _format(
        "softmax-scale",
        "8-bit kernels use the problem's softmax scale, not one derived from the dims",
        (Row(65, 1), Row(70, 3)),
        softmax_scale=0.3,
    ),
    _format(
        "rope-theta-50000-yarn",
        "kernels that rotate and quantize use all parameters of the rope",
        (Row(40, 2), Row(9, 9)),
        rope=Rope(RopePairing.NEOX, theta=5e4, yarn=UNEQUAL),
    ),
    _format(
        "rope-5001-keys",
        "positions that bfloat16 cannot represent exactly",
        (Row(5001, 1), Row(700, 2)),
        rope=Rope(RopePairing.NEOX),
        num_heads=1,
    ),
    _format("q70", "more queries than the first tile of a row", (Row(90, 70), Row(9, 9))),
    _format("q140", "more queries than a tile of 128 queries", (Row(150, 140),), num_heads=1),
    _format(
        "260-rows",
        "more than 256 rows",
        tuple(Row(3, 1) for _ in range(260)),
        num_heads=1,
        is_slow=True,
    ),
    _format("bs128", "blocks of more than 64 tokens", (Row(130, 1), Row(127, 3)), block_size=128),
)

IN_EVERY_FORMAT = (
    "append-bs64",
    "append-padded-tokens",
    "append-padded-rows",
    "append-explicit-slots",
    "append-explicit-slots-rope",
    "append-explicit-slots-swapped",
    "append-explicit-slots-descending",
    "append-block-padding",
    "append-token-padding",
    "append-strided-inputs",
    "append-600-tokens",
    "append-odd-values",
    "decode-h1",
    "decode-h9",
    "decode-h16",
    "decode-h128",
    "decode-bs1",
    "decode-bs16",
    "decode-one-long-many-short",
    "decode-scores-large",
    "decode-scores-past-a-sentinel",
    "exact-one-key-h16",
    "exact-one-key-h128",
    "exact-equal-keys-h16",
    "exact-short-rows-h128",
    "extend-continue-ctx63-q7",
    "extend-full-heads",
    "mixed-rotation0",
    "verify-chain-q4",
    "verify-tree-forest",
    "verify-tree-bs16",
    "verify-tree-100-nodes",
    "empty-middle",
    "empty-all-rows",
    "layouts-strided-everything",
    "layouts-tail-int32_max",
    "masks-tree-packed-ragged-padded",
    "large_offsets-2g-decode",
    "large_offsets-2g-extend",
    "replay-8-3-1-8",
    "replay-trees",
    "gather-bs16",
    "gather-long-chunks",
    "gather-strided",
    "gather-again",
    "batch_invariant-mixed",
    "batch_invariant-drafts",
    "layer-mixed",
    "layer-padded",
    "layer-rope-neox",
    "layer-cache-scale",
    "layer-tree-full",
    "masks-non-causal-edges",
    "masks-tree-full",
    "decode-2500-keys",
    "decode-33k-keys-h16",
    "rope-neox-tree-packed",
    "rope-interleaved-tree-full",
    "masks-non-causal-prompt",
    "layouts-strided-tree-full",
    "append-explicit-slots-permuted",
    "verify-chain-h64-q4-5k",
    "verify-chain-q8-over-tiles",
    "verify-tree-n64-9k",
    "decode-tiles-1-to-16",
    "masks-non-causal-padded",
    "decode-h20",
    "extend-h24-q5",
    "append-non-causal-short",
    "append-non-causal-short-rope",
    "masks-non-causal-short-many-queries",
)
