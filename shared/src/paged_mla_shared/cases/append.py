"""Writing the cache: every byte of the named rows, and no other (S-10)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.cases.decode import BLOCK_SIZES
from paged_mla_shared.cases.mixed import CONTINUE_MANY, CONTINUE_ONE, DECODE, FRESH, PADDED

GROUP = "append"

_ROWS = (FRESH, CONTINUE_ONE, PADDED, CONTINUE_MANY, DECODE)


def _append(
    name: str,
    why: str,
    rows: tuple[Row, ...] = _ROWS,
    *,
    block_size: int = 64,
    padded_tokens: int = 0,
    token_padding: int = 0,
    block_padding: int = 0,
    strided_inputs: bool = False,
    explicit_slots: bool = False,
) -> Case:
    return Case(
        group=GROUP,
        name=name,
        why=why,
        rules=("S-1", "S-3", "S-10"),
        rows=rows,
        num_heads=2,
        block_size=block_size,
        padded_tokens=padded_tokens,
        token_padding=token_padding,
        block_padding=block_padding,
        strided_inputs=strided_inputs,
        explicit_slots=explicit_slots,
    )


CASES = (
    *(_append(f"bs{bs}", "slots at this block size", block_size=bs) for bs in BLOCK_SIZES),
    _append("padded-tokens", "padded tokens write nothing", padded_tokens=7),
    _append("padded-rows", "padded rows write nothing", (Row(0, 3), Row(70, 6), Row(0, 1))),
    _append("idle", "an idle step leaves every byte", (Row(0, 1), Row(0, 2))),
    _append("explicit-slots", "the engine's own slots, -1 skipped", explicit_slots=True),
    _append(
        "explicit-slots-bs1", "one token per block, -1 skipped", explicit_slots=True, block_size=1
    ),
    _append("block-padding", "gaps between blocks stay as they were", block_padding=128),
    _append("token-padding", "gaps between tokens stay as they were", token_padding=32),
    _append("strided-inputs", "latents as views", strided_inputs=True),
    _append("last-slot", "the last slot of the last block", (Row(64, 64), Row(128, 1))),
)
