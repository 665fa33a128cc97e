"""The options that describe a model's attention and its cache; this needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from paged_mla_optimized.config.limits import MAX_BLOCK_SIZE
from paged_mla_optimized.planning.families import Demand
from paged_mla_shared.backend import PRODUCTS
from paged_mla_shared.dims import PRESETS, MlaDims
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.options import one_of, whole

_DTYPE_OF_PLAIN_FORMAT = {name: dtype for dtype, name in PLAIN_FORMAT_OF_DTYPE.items()}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What the options say.

    Parameters
    ----------
    preset : str
        Key of :data:`paged_mla_shared.dims.PRESETS`.
    dtype : str
        Of queries and answers: "bfloat16", "float16" or "float32".
    cache_format : str
        Key of :data:`paged_mla_shared.formats.FORMATS`.
    products : str
        "exact" or "fast", as :class:`~paged_mla_optimized.config.attention.MlaConfig` has it.
    block_size : int
        Tokens of a cache block.
    """

    preset: str
    dtype: str
    cache_format: str
    products: str
    block_size: int

    @property
    def dims(self) -> MlaDims:
        """The sizes of the model's attention."""
        return PRESETS[self.preset]

    def demand(self, arch: str, num_heads: int) -> Demand:
        """Return what this asks of the kernels on an architecture."""
        return Demand(
            arch=arch,
            dtype=self.dtype,
            cache_format=self.cache_format,
            products=self.products,
            num_heads=num_heads,
            head_dims=(self.dims.kv_lora_rank, self.dims.qk_rope_head_dim),
        )

    def __str__(self) -> str:
        dims = f"kv_lora_rank {self.dims.kv_lora_rank}, "
        dims += f"qk_rope_head_dim {self.dims.qk_rope_head_dim}"
        cache = f"{self.cache_format} cache in blocks of {self.block_size} tokens"
        queries = f"{self.dtype} queries, {self.products} products"
        return f"{self.preset} ({dims}); {queries}; {cache}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`configuration_of`."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--dims",
        type=one_of(PRESETS),
        default="deepseek-v3",
        metavar="NAME",
        help=f"the model's sizes: {', '.join(PRESETS)} (default: %(default)s)",
    )
    group.add_argument(
        "--cache-format",
        type=one_of(FORMATS),
        metavar="NAME",
        help=f"how a cached token is stored: {', '.join(FORMATS)} "
        "(default: that of the dtype, and bf16)",
    )
    group.add_argument(
        "--dtype",
        type=one_of(PLAIN_FORMAT_OF_DTYPE),
        metavar="NAME",
        help=f"of queries and answers: {', '.join(PLAIN_FORMAT_OF_DTYPE)} "
        "(default: that of the cache, and bfloat16 over an FP8 cache)",
    )
    group.add_argument(
        "--products",
        type=one_of(PRODUCTS),
        default="exact",
        metavar="NAME",
        help="exact, or fast: kernels over an FP8 cache may round queries to FP8 "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--block-size",
        type=whole(1),
        default=64,
        metavar="N",
        help="the tokens of a cache block (default: %(default)s)",
    )


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Add ``--heads``; ``None`` stands for all heads of the model."""
    parser.add_argument(
        "--heads",
        type=whole(1),
        metavar="H",
        help="the query heads on one GPU (default: all heads of the model)",
    )


def configuration_of(options: argparse.Namespace) -> Configuration:
    """Return what the options of :func:`add_options` say.

    Raises
    ------
    InvalidArgument
        Blocks are too large, or two options contradict each other.
    """
    cache_format = options.cache_format or PLAIN_FORMAT_OF_DTYPE[options.dtype or "bfloat16"]
    stored, block_size = FORMATS[cache_format], options.block_size
    of_cache = _DTYPE_OF_PLAIN_FORMAT.get(stored.name)
    dtype = options.dtype or of_cache or "bfloat16"
    if of_cache not in {None, dtype}:
        allowed = f"{of_cache}, the type of --cache-format {stored.name}"
        raise InvalidArgument("--dtype", dtype, allowed)
    if block_size > MAX_BLOCK_SIZE:
        raise InvalidArgument("--block-size", block_size, f"1 to {MAX_BLOCK_SIZE}")
    multiple = stored.block_size_multiple
    if block_size % multiple:
        allowed = f"multiples of {multiple} with --cache-format {stored.name}"
        raise InvalidArgument("--block-size", block_size, allowed)
    return Configuration(
        preset=options.dims,
        dtype=dtype,
        cache_format=stored.name,
        products=options.products,
        block_size=block_size,
    )
