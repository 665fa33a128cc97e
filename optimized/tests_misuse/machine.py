"""The device of all draws: Triton's interpreter at small dims, or a GPU at DeepSeek-V3 dims."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accesses import checked_accesses

from paged_mla_adapters.guards import Guards
from paged_mla_optimized import MlaConfig, PagedMla
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_shared.problem import Rope, RopePairing

ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
MARGIN = int(os.environ.get("MISUSE_MARGIN", "1024"))
FILLINGS = (0xFF, 0x00)
"""The bytes around tensors and in all memory that must not be read.

The first value gives NaN, -1 and true, the second 0 and false. Each draw runs with both.
"""

_SMALL = AttendVariant(  # each program costs time in the interpreter
    tile_m=16, tile_n=16, num_warps=1, num_stages=1, programs_per_sm=3, min_units=1, split_tiles=1
)
_FP8 = ("fp8_e4m3", "fp8_ds_mla", "fp8_block_token", "fp8_block_group")


@dataclass(frozen=True)
class Setup:
    """A config, and the tolerance of an output compared with float64 over the same cache."""

    config: MlaConfig
    tolerance: float
    variant: AttendVariant | None = None


def _setups_of_interpreter() -> dict[str, Setup]:
    plain = {
        "num_heads": 2,
        "softmax_scale": 0.2,
        "block_size": 4,
        "max_rows": 5,
        "max_query_tokens": 12,
        "max_model_len": 23,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "dtype": torch.float32,
        "cache_format": "fp32",
    }

    def of(
        tolerance: float = 1e-4, variant: AttendVariant | None = _SMALL, **changes: Any
    ) -> Setup:
        return Setup(MlaConfig(**(plain | changes)), tolerance, variant)

    setups = {
        "causal": of(variant=None),
        "block_of_1": of(block_size=1, max_model_len=9),
        "half": of(2e-2, dtype=torch.float16, cache_format="fp16", reserved_slot=4, lse_base="2"),
        "non_causal": of(mask="non_causal"),
        "non_causal_rope": of(mask="non_causal", rope=Rope(RopePairing.NEOX)),
        "tree:qlen": of(mask="tree:qlen", max_draft_tokens=5),
        "tree:full": of(mask="tree:full", max_draft_tokens=5, rope=Rope(RopePairing.NEOX)),
        "tree:packed": of(mask="tree:packed", max_draft_tokens=9),
        "batch_invariant": of(batch_invariant=True),
        "rope": of(rope=Rope(RopePairing.INTERLEAVED)),
        "map": of(table_multiple=4, table_fill=0),
        "map_tree": of(table_multiple=1, mask="tree:qlen", max_draft_tokens=5),
    }
    return setups | {name: of(1e-3, cache_format=name) for name in _FP8}


def _setups_of_gpu() -> dict[str, Setup]:
    plain = {
        "num_heads": 16,
        "softmax_scale": 192**-0.5,
        "block_size": 64,
        "max_rows": 6,
        "max_query_tokens": 40,
        "max_model_len": 500,
    }
    tree = {"max_draft_tokens": 8}

    def of(tolerance: float = 3e-2, **changes: Any) -> Setup:
        return Setup(MlaConfig(**(plain | changes)), tolerance)

    fast = {"cache_format": "fp8_e4m3", "products": "fast"}
    return {
        "few": of(),
        "few_non_causal": of(mask="non_causal"),
        "few_tree": of(num_heads=4, mask="tree:packed", **tree),
        "tile": of(num_heads=128),
        "tile_tree_rope": of(
            num_heads=128, mask="tree:full", rope=Rope(RopePairing.INTERLEAVED), **tree
        ),
        "tile_map": of(num_heads=64, mask="tree:qlen", table_multiple=4, table_fill=0, **tree),
        "few_fp8": of(cache_format="fp8_e4m3"),
        "few_fp8_inline": of(cache_format="fp8_ds_mla"),
        "tile_fp8": of(1e-1, num_heads=128, **fast),
        "tile_fp8_scaled": of(1e-1, num_heads=128, products="fast", cache_format="fp8_block_token"),
        "tile_exact": of(num_heads=128, cache_format="fp8_ds_mla"),
        "tile_exact_group": of(num_heads=128, cache_format="fp8_block_group"),
        "gathered_blocks": of(block_size=2, max_model_len=30),
        "gathered_blocks_tile": of(num_heads=128, block_size=2, max_model_len=30),
        "boxes_of_16": of(num_heads=128, block_size=16),
        "portable": of(num_heads=3, kv_lora_rank=128, qk_rope_head_dim=32, reserved_slot=4),
        "portable_fp8": of(kv_lora_rank=128, cache_format="fp8_e4m3", rope=Rope(RopePairing.NEOX)),
        "batch_invariant": of(batch_invariant=True, lse_base="2"),
        "batch_invariant_tile": of(num_heads=128, batch_invariant=True, mask="non_causal"),
    }


SETUPS = _setups_of_gpu() if ON_GPU else _setups_of_interpreter()


@cache
def mla_of(name: str, number: int = 0) -> PagedMla:
    """Return an instance of a setup; instances with other numbers share no buffers with it."""
    setup = SETUPS[name]
    del number
    return PagedMla(setup.config, DEVICE, variant=setup.variant)


def forget() -> None:
    """Drop instances whose buffers a failed launch may have left incomplete."""
    mla_of.cache_clear()


def new_guards() -> Guards:
    """Return the allocator of one draw."""
    return Guards(DEVICE, margin=MARGIN)


@contextmanager
def watched() -> Iterator[None]:
    """Check the accesses of kernels that run inside, and wait for their end."""
    with nullcontext() if ON_GPU else checked_accesses():
        yield
    if ON_GPU:
        torch.cuda.synchronize()


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy as integers, so that NaN equals NaN."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (
        tensor.detach()
        .clone(memory_format=torch.contiguous_format)
        .view(sizes[tensor.element_size()])
    )
