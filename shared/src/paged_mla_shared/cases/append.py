"""Cases of appends: they write every byte of the tokens with slots, and no other byte (S-10)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, SlotOrder, in_group
from paged_mla_shared.cases.decode import BLOCK_SIZES
from paged_mla_shared.cases.mixed import CONTINUE_MANY, CONTINUE_ONE, DECODE, FRESH, PADDED
from paged_mla_shared.problem import Mask, Rope, RopePairing

GROUP = "append"
PRODUCTION = {"keys": 33000, "queries": 600, "rows": 300, "tokens": 600, "block ids": 2**16}

_ROWS = (FRESH, CONTINUE_ONE, PADDED, CONTINUE_MANY, DECODE)

_append = in_group(GROUP, "S-1", "S-3", "S-10", rows=_ROWS, num_heads=2)

CASES = (
    *(
        _append(f"bs{bs}", "slots at this block size", block_size=bs, fixed=("block_size",))
        for bs in BLOCK_SIZES
    ),
    _append("padded-tokens", "padded tokens write nothing", padded_tokens=7),
    _append("padded-rows", "padded rows write nothing", (Row(0, 3), Row(70, 6), Row(0, 1))),
    _append("idle", "an idle step changes no byte", (Row(0, 1), Row(0, 2))),
    _append("2050-tokens", "more than 2048 tokens in a step", (Row(2050, 2050),), is_large=True),
    _append(
        "explicit-slots",
        "slots that the engine passes; tokens with -1 are skipped",
        explicit_slots=True,
    ),
    _append(
        "explicit-slots-rope",
        "slot_mapping determines the slots of tokens, not their positions",
        explicit_slots=True,
        rope=Rope(RopePairing.NEOX),
    ),
    _append(
        "explicit-slots-swapped",
        "a slot_mapping whose first and last slots look like a consecutive range",
        (Row(60, 60),),
        explicit_slots=True,
        slot_order=SlotOrder.SWAPPED,
    ),
    _append(
        "explicit-slots-permuted",
        "tokens of a scale group are far apart in the step, and the lowest can be anywhere",
        explicit_slots=True,
        slot_order=SlotOrder.PERMUTED,
        uneven=True,
    ),
    _append(
        "explicit-slots-bs1",
        "one token per block; -1 is skipped",
        explicit_slots=True,
        block_size=1,
    ),
    *(
        _append(
            f"explicit-slots-{order}",
            "a slot_mapping in this order",
            explicit_slots=True,
            slot_order=order,
        )
        for order in (SlotOrder.DESCENDING, SlotOrder.NONE)
    ),
    *(
        _append(f"bs{bs}", "slots at a block size that is not a power of two", block_size=bs)
        for bs in (3, 48, 100)
    ),
    _append("bs1056", "slots in blocks of more than 256 tokens", (Row(1070, 20),), block_size=1056),
    _append("spare-capacity", "capacities far larger than the step", spare=9),
    _append("block-padding", "gaps between blocks stay unchanged", block_padding=128),
    _append("token-padding", "gaps between tokens stay unchanged", token_padding=32),
    _append("strided-inputs", "latents that are views", strided_inputs=True),
    _append(
        "strided-explicit-slots",
        "latents and slot_mapping that are views",
        strided_inputs=True,
        explicit_slots=True,
    ),
    _append(
        "rows-of-several",
        "many rows of several tokens, and some without tokens",
        tuple(Row(40 + i % 50, i % 6) for i in range(120)),
    ),
    _append(
        "rope-explicit-slots",
        "a token's position does not depend on which tokens have slots",
        explicit_slots=True,
        rope=Rope(RopePairing.INTERLEAVED),
    ),
    *(
        _append(
            f"non-causal-short{name}",
            "tokens before a row's first position are not written; all other tokens are",
            (Row(70, 6), Row(1, 3), Row(3, 5), Row(65, 66), Row(5, 5), Row(0, 2)),
            mask=Mask.NON_CAUSAL,
            **more,
        )
        for name, more in (
            ("", {}),
            ("-bs1", {"block_size": 1}),
            ("-rope", {"rope": Rope(RopePairing.INTERLEAVED), "block_size": 16}),
            ("-explicit-slots", {"explicit_slots": True, "slot_order": SlotOrder.TABLE}),
        )
    ),
    _append("last-slot", "the last slot of the last block", (Row(64, 64), Row(128, 1))),
    _append("600-tokens", "a long chunk is written to its end", (Row(1700, 600), Row(70, 2))),
    _append(
        "600-explicit-slots",
        "a slot_mapping of a long chunk; -1 is skipped",
        (Row(700, 600),),
        explicit_slots=True,
    ),
    _append("33k-keys", "tokens after a context of 33000 tokens", (Row(33001, 2), Row(5, 1))),
    _append("300-rows", "many rows of one token", tuple(Row(1 + i % 90, 1) for i in range(300))),
    _append(
        "blocks-past-2-16",
        "block ids of more than 16 bits",
        block_size=1,
        cache_blocks=2**16 + 500,
    ),
    _append(
        "2g-explicit-slots",
        "slots of slot_mapping whose offsets do not fit 31 bits",
        explicit_slots=True,
        cache_elements=2**31 + 2**24,
    ),
    _append("odd-values", "bits are copied; values are not converted", odd_values=True),
    _append(
        "odd-values-explicit-slots",
        "bits are also copied to the slots of slot_mapping",
        odd_values=True,
        explicit_slots=True,
    ),
)
