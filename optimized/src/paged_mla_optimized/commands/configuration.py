"""The options for a model's attention and its cache; this module needs no torch."""

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
    """The values of the options.

    Parameters
    ----------
    preset : str
        A key of :data:`paged_mla_shared.dims.PRESETS`.
    dtype : str
        The dtype of queries and outputs: "bfloat16", "float16" or "float32".
    cache_format : str
        A key of :data:`paged_mla_shared.formats.FORMATS`.
    products : str
        "exact" or "fast", as in :class:`~paged_mla_optimized.config.attention.MlaConfig`.
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
        """Return the demand of this configuration on an architecture."""
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
        help=f"the format of a cached token: {', '.join(FORMATS)} "
        "(default: the plain format of the dtype, or bf16)",
    )
    group.add_argument(
        "--dtype",
        type=one_of(PLAIN_FORMAT_OF_DTYPE),
        metavar="NAME",
        help=f"the dtype of queries and outputs: {', '.join(PLAIN_FORMAT_OF_DTYPE)} "
        "(default: the dtype of the cache, or bfloat16 with an FP8 cache)",
    )
    group.add_argument(
        "--products",
        type=one_of(PRODUCTS),
        default="exact",
        metavar="NAME",
        help="exact, or fast: kernels may round queries to FP8 for an FP8 cache "
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
    """Add the option ``--heads``, whose default ``None`` means all heads of the model."""
    parser.add_argument(
        "--heads",
        type=whole(1),
        metavar="H",
        help="the query heads on one GPU (default: all heads of the model)",
    )


def configuration_of(options: argparse.Namespace) -> Configuration:
    """Return the configuration of the options that :func:`add_options` adds.

    Raises
    ------
    InvalidArgument
        A block size is not allowed, or two options contradict each other.
    """
    cache_format = options.cache_format or PLAIN_FORMAT_OF_DTYPE[options.dtype or "bfloat16"]
    stored, block_size = FORMATS[cache_format], options.block_size
    of_cache = _DTYPE_OF_PLAIN_FORMAT.get(stored.name)
    dtype = options.dtype or of_cache or "bfloat16"
    if of_cache not in {None, dtype}:
        allowed = f"{of_cache}, the dtype of --cache-format {stored.name}"
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
