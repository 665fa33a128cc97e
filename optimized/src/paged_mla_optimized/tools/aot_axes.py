"""What kernels are compiled for: the options that shape code, and the numbers that are drawn.

Every combination of options exists. A number, such as ``num_heads``, is compiled into some kernels
and has too many values for that. Each variant takes one of them, drawn from its own name, so that
it is the same in every run, and all values are met beside different options.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from paged_mla_optimized.config.attention import DTYPE_NAMES, TORCH_DTYPES, MlaConfig
from paged_mla_optimized.config.limits import MAX_HEADS
from paged_mla_optimized.operations.attend.hopper import hopper_box
from paged_mla_optimized.planning.families import (
    MOST_PAIRS,
    PORTABLE,
    AttendVariant,
    Demand,
    portable_variant,
    serving_variant,
    variants_by_query_len,
)
from paged_mla_shared.backend import PRODUCTS
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE

T = TypeVar("T")

HEADS = range(1, MAX_HEADS + 1)
"""Of one rank."""
ROWS = (1, 2, 4, 7, 16, 64, 256, 2048)
"""``max_rows``: from one split of a fixed length for each row to the most."""
BLOCKS = (*range(1, 33), 40, 48, 64, 96, 100, 128, 192, 256)
"""``block_size``: all that are small, and larger ones of each kind that a kernel tells apart."""
DRAFTS = (1, 33, 65)
"""``max_draft_tokens`` of a tree: one to three words of 32."""
SERVED = (512, 64)
"""R and P of DeepSeek's latents; the portable kernels take each other pair by turns."""
DIMS = tuple((1 << r, 1 << p) for r in range(4, 10) for p in range(4, 7))
"""All R and P."""

_NUMBERS = {
    *("num_heads", "block_size", "BLOCK_SIZE", "block_rows", "SEARCH_STEPS", "ROWS", "ALL_ROWS"),
    *("WINDOW", "PROGRAMS", "HEADS", "TILES", "L2_KEYS", "scale", "COLUMNS", "WORLD", "INTERLEAVE"),
}
_FEW_OR_NONE = {"TREE_WORDS", "FIXED_SPLITS", "ROW_SHARE", "SCALES"}  # without them: less code
_WIDTHS = {"R", "P", "LINE", "SHARES", "NOPE", "WIDE", "ROPE", "V"}


class Types(NamedTuple):
    """What queries and caches are of, and what products may be."""

    dtype: str
    cache_format: str
    products: str


def types() -> Iterator[Types]:
    """Yield every legal combination."""
    for dtype in DTYPE_NAMES.values():
        for name, stored in FORMATS.items():
            if name == PLAIN_FORMAT_OF_DTYPE[dtype]:
                yield Types(dtype, name, PRODUCTS[0])
            elif not stored.is_plain:
                yield from (Types(dtype, name, products) for products in PRODUCTS)


def config_of(types: Types, dims: tuple[int, int], **given: Any) -> MlaConfig:
    """Return a config of the least capacities, but for those `given`."""
    least = {"num_heads": 1, "block_size": 64, "max_rows": 1}
    return MlaConfig(
        softmax_scale=1.0,
        max_query_tokens=1,
        max_model_len=1,
        dtype=TORCH_DTYPES[types.dtype],
        cache_format=types.cache_format,
        products=types.products,
        kv_lora_rank=dims[0],
        qk_rope_head_dim=dims[1],
        **least | given,
    )


def _demand(arch: str, types: Types, dims: tuple[int, int], num_heads: int) -> Demand:
    return Demand(
        arch=arch,
        dtype=types.dtype,
        cache_format=types.cache_format,
        products=types.products,
        num_heads=num_heads,
        head_dims=dims,
    )


def is_for_gluon(arch: str, types: Types, dims: tuple[int, int]) -> bool:
    """Return whether a Gluon kernel serves such latents."""
    return serving_variant(_demand(arch, types, dims, 1), 1).family != PORTABLE


@lru_cache(maxsize=256)
def served(arch: str, types: Types, dims: tuple[int, int]) -> Mapping[AttendVariant, list[int]]:
    """Return every variant that a step may get, and how many heads get it."""
    found: dict[AttendVariant, list[int]] = {}
    for num_heads in HEADS:
        demand = _demand(arch, types, dims, num_heads)
        longest = -(-MOST_PAIRS // num_heads)
        # The portable kernel is a backend of its own too.
        portable = [portable_variant(demand, length) for length in range(1, longest + 1)]
        for variant in dict.fromkeys((*variants_by_query_len(demand, longest), *portable)):
            found.setdefault(variant, []).append(num_heads)
    return found


def blocks_by_box(cache_format: str) -> dict[int, list[int]]:
    """Return legal block sizes by the keys of one copy on Hopper."""
    multiple = FORMATS[cache_format].block_size_multiple
    found: dict[int, list[int]] = {}
    for block_size in BLOCKS:
        if block_size % multiple == 0:
            found.setdefault(hopper_box(block_size), []).append(block_size)
    return found


def blocks_by_tile(cache_format: str, tile_n: int) -> dict[bool, list[int]]:
    """Return legal block sizes by whether blocks are a whole number of key tiles."""
    found: dict[bool, list[int]] = {}
    for sizes in blocks_by_box(cache_format).values():
        for block_size in sizes:
            found.setdefault(block_size % tile_n == 0, []).append(block_size)
    return found


def drawn(name: str, choices: Sequence[T]) -> T:
    """Return the choice that a name stands for."""
    return choices[zlib.crc32(name.encode()) % len(choices)]


def numbers_of(name: str, mask: str) -> dict[str, int]:
    """Return the capacities that a variant is compiled for."""
    drafts = drawn(f"drafts {name}", DRAFTS) if mask.startswith("tree") else 0
    return {"max_rows": drawn(f"rows {name}", ROWS), "max_draft_tokens": drafts}


def shape(kernel: Any, constants: Mapping[str, Any]) -> Hashable:
    """Return what shapes the code of a kernel: its constants, but of numbers only whether they are.

    Widths are numbers too where they are not those of `SERVED`, and a kernel takes any.
    """
    kept: dict[str, Any] = {}
    is_whole = kernel.is_gluon() or (constants.get("R"), constants.get("P", 64)) == SERVED
    for name, value in constants.items():
        is_word = isinstance(value, (str, bool))
        is_number = name in _NUMBERS or name.startswith("stride")
        if value is None or (is_number and not is_word):
            continue
        if name in _FEW_OR_NONE and not is_word:
            kept[name] = value > 0
        elif is_whole or name not in _WIDTHS or is_word:
            kept[name] = value
    if "WIDE" in constants:
        kept["HAS_REST"] = constants["NOPE"] > constants["WIDE"]
    return kernel.fn.__name__, frozenset(kept.items())
