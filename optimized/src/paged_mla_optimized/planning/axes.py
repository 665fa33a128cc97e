"""The options and numbers for which kernels are compiled ahead of time.

Kernels are compiled for every combination of options. A number such as ``num_heads``, which some
kernels have as a constant, has too many values for that. Each variant is compiled for one value,
which its name determines. Therefore the value is the same in every run, and over all variants all
values occur with different options.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from paged_mla_optimized.config.attention import DTYPE_NAMES, TORCH_DTYPES, MlaConfig
from paged_mla_optimized.config.limits import MAX_HEADS
from paged_mla_optimized.planning.families import (
    MOST_PAIRS,
    PORTABLE,
    AttendVariant,
    Demand,
    portable_variant,
    serving_variant,
    variants_by_query_len,
)
from paged_mla_optimized.runtime.kernel_spec import SHORT
from paged_mla_shared.backend import PRODUCTS
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Rope, RopePairing

T = TypeVar("T")

HEADS = range(1, MAX_HEADS + 1)
"""Query heads of one rank."""
ROWS = (1, 2, 4, 7, 16, 64, 256, 2048)
"""``max_rows``: from one fixed-length split per row to the most."""
BLOCKS = (*range(1, 33), 40, 48, 64, 96, 100, 128, 192, 256)
"""``block_size``: every small size, and larger sizes of each kind that a kernel distinguishes."""
DRAFTS = (1, 33, 65)
"""``max_draft_tokens`` of a tree: one to three words of 32."""
SERVED = (512, 64)
"""R and P of DeepSeek's latents; portable kernels are compiled for one of the other pairs."""
DIMS = tuple((1 << r, 1 << p) for r in range(4, 10) for p in range(4, 7))
"""All pairs of R and P."""
OTHER_DIMS = tuple(dims for dims in DIMS if dims != SERVED)
LONG_BLOCK = 256
"""A block size whose scale groups are too long for the append kernel that writes runs."""
CUTS = (False, True)
"""Whether splits have a fixed length."""
ROPES = (None, *map(Rope, RopePairing))
"""No rotation, or one rope of each pairing."""


class Types(NamedTuple):
    """The dtype of queries, the cache format, and the products."""

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
    """Return a config of the smallest capacities, with the fields in `given` replaced."""
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
    """Return whether a Gluon kernel serves latents of these types and sizes."""
    return serving_variant(_demand(arch, types, dims, 1), 1).family != PORTABLE


@lru_cache(maxsize=256)
def served(arch: str, types: Types, dims: tuple[int, int]) -> Mapping[AttendVariant, list[int]]:
    """Return every variant that a step can get, with the head counts for which it is used."""
    found: dict[AttendVariant, list[int]] = {}
    for num_heads in HEADS:
        demand = _demand(arch, types, dims, num_heads)
        longest = -(-MOST_PAIRS // num_heads)
        # The portable kernel is also used on its own, as a separate backend.
        portable = [portable_variant(demand, length) for length in range(1, longest + 1)]
        for variant in dict.fromkeys((*variants_by_query_len(demand, longest), *portable)):
            found.setdefault(variant, []).append(num_heads)
    return found


def drawn(name: str, choices: Sequence[T]) -> T:
    """Return the choice that a name determines."""
    return choices[zlib.crc32(name.encode()) % len(choices)]


def numbers_of(name: str, mask: str) -> dict[str, int]:
    """Return the capacities for which a variant is compiled."""
    drafts = drawn(f"drafts {name}", DRAFTS) if mask.startswith("tree") else 0
    return {"max_rows": drawn(f"rows {name}", ROWS), "max_draft_tokens": drafts}


def portable_tiles(
    arch: str,
) -> Iterator[tuple[Types, tuple[tuple[int, int], ...], AttendVariant, list[int]]]:
    """Yield tiles of the portable kernel, also those in which it replaces a Hopper kernel.

    Each item has types, pairs of R and P, the variant, and the head counts that it serves.
    """
    for of in types():
        others = [dims for dims in OTHER_DIMS if is_for_gluon(arch, of, dims)]
        for dims in (SERVED, *(others or OTHER_DIMS[:1])):
            for variant, heads in served(arch, of, dims).items():
                is_chosen = variant.family != PORTABLE or dims == SERVED
                yield of, (dims,) if is_chosen else OTHER_DIMS, variant, heads


def cached() -> Iterator[Types]:
    """Yield the types of every cache; caches do not depend on the products."""
    return (of for of in types() if of.products == "exact")


def read_configs() -> Iterator[MlaConfig]:
    """Yield configs for the kernels that read or copy cached tokens, two for each cache type."""
    for of, is_served in itertools.product(cached(), (True, False)):
        name = f"{of}-{is_served}-{ROPES[-1]}"
        dims = SERVED if is_served else drawn(f"dims {name}", OTHER_DIMS)
        max_rows = drawn(f"rows {name}", ROWS)
        yield config_of(of, dims, block_size=LONG_BLOCK, max_rows=max_rows)


def short(types: Types) -> str:
    """Return the part of a name for the dtype and the cache format."""
    dtype = SHORT[TORCH_DTYPES[types.dtype]]
    if FORMATS[types.cache_format].is_plain:
        return dtype
    return f"{dtype}-{types.cache_format}"


def cut(is_fixed: bool) -> str:  # noqa: FBT001 - short, for f-strings of names
    """Return the part of a name for whether splits have a fixed length."""
    return "fixed" if is_fixed else "parts"


def latents(config: MlaConfig) -> str:
    """Return the part of a name for the cached latents."""
    dtype = SHORT[config.dtype]
    stored = f"{dtype}-{config.cache_format}" if config.is_fp8 else dtype
    return f"r{config.kv_lora_rank}-{stored}"


def query_config(dtype: str, dims: tuple[int, int], rope: Rope | None) -> MlaConfig:
    """Return a config for which the kernels of queries and of outputs are compiled."""
    of = next(of for of in types() if of.dtype == dtype)
    num_heads = drawn(f"heads {dtype}-{dims}-{rope}", HEADS)
    return config_of(of, dims, num_heads=num_heads, rope=rope)
