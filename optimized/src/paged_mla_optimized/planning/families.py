"""Choose the kernel family and the tiles of a step: a pure table that needs no GPU and no torch.

:data:`FAMILIES` is the table. The launchers and the ahead-of-time compiler both use it. Therefore
every variant that can run has been compiled and checked against its architecture's limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paged_mla_optimized.config.architectures import INTERPRETER
from paged_mla_optimized.config.limits import largest_power_of_two
from paged_mla_shared.formats import FORMATS

MAX_FIXED_SPLITS = 128
"""Most splits of one row, over all its query tiles; about as many as a device's multiprocessors."""
FIXED_SPLIT_BYTES = 256 << 20
"""Limit for the memory of partial results of batch-invariant splits; it can reduce the splits."""

PORTABLE = "portable"
FEW = "few"  # kernels/hopper/decode_few.py
TILE = "tile"  # kernels/hopper/decode_tile.py
FEW_FP8 = "few_fp8"  # kernels/hopper/decode_few_fp8.py
TILE_FP8 = "tile_fp8"  # kernels/hopper/decode_tile_fp8.py
TILE_EXACT = "tile_exact"  # kernels/hopper/decode_tile_exact.py


@dataclass(frozen=True, kw_only=True)
class AttendVariant:
    """The tile sizes and schedule constants of one attend launch.

    Parameters
    ----------
    tile_m : int
        Pairs of token and head in one query tile; a power of two >= 16.
    tile_n : int
        Keys of one key tile; a power of two >= 16.
    num_warps, num_stages : int
        Triton's launch options for the portable kernel.
    programs_per_sm : int
        The grid has this many programs for each multiprocessor.
    lanes : int
        Number of query tiles that read the same keys at the same time, so that later reads of a key
        hit L2. A power of two. The plan uses fewer for steps whose rows have fewer query tiles.
    min_units : int
        Minimum size of a part of the work, in key tiles and starts of groups. Also the minimum size
        of a split, in key tiles, before the splits of a row become equal.
    overhead : int
        The cost of starting a group or a fixed-length split, in key tiles that a program could
        compute in that time.
    slack : int
        Allowed excess of a part over an equal share, in 32nds, so that rows of one length are split
        at equal places. It is large for kernels that are limited by memory: fewer programs can
        saturate the memory, and the free multiprocessors let the combine kernel start at once.
    family : str
        A key of :data:`FAMILIES`. For tensors that a Gluon kernel cannot address, the portable
        kernel runs with the same tiles.
    split_tiles : int
        Largest number of key tiles of a fixed-length split, unless a row would have too many
        splits (S-20); doubled for rows of four query tiles or more. Shorter splits cost time to
        write and merge partial results; longer splits leave programs with unequal work.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    lanes: int = 1
    min_units: int = 2
    overhead: int = 1
    slack: int = 1
    family: str = PORTABLE
    split_tiles: int = 8

    @property
    def lane_steps(self) -> int:
        """Number of doublings from one lane to the maximum."""
        return self.lanes.bit_length() - 1

    def programs(self, num_sms: int) -> int:
        """Return the size of the grid on a device with `num_sms` multiprocessors."""
        return max(self.lanes, num_sms * self.programs_per_sm)


_SMALL = {  # archs with 99 KiB of shared memory
    16: AttendVariant(tile_m=16, tile_n=16, num_warps=4, num_stages=3),
    32: AttendVariant(tile_m=32, tile_n=16, num_warps=8, num_stages=3),
    64: AttendVariant(tile_m=64, tile_n=16, num_warps=8, num_stages=2),
}
_TABLE: dict[str, dict[int, AttendVariant]] = {
    "sm80": {
        16: AttendVariant(tile_m=16, tile_n=32, num_warps=4, num_stages=2, programs_per_sm=2),
        32: AttendVariant(tile_m=32, tile_n=32, num_warps=8, num_stages=3),
        64: AttendVariant(tile_m=64, tile_n=16, num_warps=8, num_stages=3),
    },
    "sm86": _SMALL,
    "sm89": _SMALL,
    "sm90": {
        16: AttendVariant(tile_m=16, tile_n=32, num_warps=4, num_stages=3, programs_per_sm=2),
        32: AttendVariant(tile_m=32, tile_n=32, num_warps=8, num_stages=3),
        64: AttendVariant(tile_m=64, tile_n=64, num_warps=8, num_stages=2),
    },
    "sm100": {  # tiles of 64 pairs would use tcgen05, whose accumulator spills when it is rescaled
        16: AttendVariant(tile_m=16, tile_n=32, num_warps=4, num_stages=3, programs_per_sm=2),
        32: AttendVariant(tile_m=32, tile_n=32, num_warps=8, num_stages=3),
    },
    "sm120": _SMALL,
    INTERPRETER: {  # few and small parts, so that small tests also split and merge
        tile_m: AttendVariant(
            tile_m=tile_m,
            tile_n=64,
            num_warps=1,
            num_stages=1,
            programs_per_sm=10,
            min_units=1,
            split_tiles=2,
        )
        for tile_m in (16, 32, 64)
    },
}
_HIGHEST_OVER_FP8 = 32  # decoded values leave too few registers for larger tiles
_FLOAT32 = AttendVariant(tile_m=16, tile_n=16, num_warps=8, num_stages=2)


def tile_variants(arch: str, dtype: str, cache_format: str) -> tuple[AttendVariant, ...]:
    """Return the tile shapes for a dtype and a format, smallest first, with one lane each."""
    if arch == INTERPRETER:
        return tuple(_TABLE[arch].values())
    if dtype == "float32":
        return (_FLOAT32,)  # exact products run without tensor cores
    is_plain = FORMATS[cache_format].is_plain
    highest = max(_TABLE[arch]) if is_plain else _HIGHEST_OVER_FP8
    return tuple(tile for tile in _TABLE[arch].values() if tile.tile_m <= highest)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The requirements of an instance that decide which kernels fit.

    Parameters
    ----------
    arch : str
        A key of :data:`SHARED_MEMORY`, or :data:`INTERPRETER`.
    dtype : str
        "float32", "float16" or "bfloat16".
    cache_format : str
        A key of :data:`paged_mla_shared.formats.FORMATS`.
    products : str
        "exact" or "fast", as in :class:`~paged_mla_optimized.config.attention.MlaConfig`.
    num_heads : int
        H, the query heads of this rank.
    head_dims : (R, P)
    """

    arch: str
    dtype: str
    cache_format: str
    products: str
    num_heads: int
    head_dims: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kernel, with the steps that it serves.

    Parameters
    ----------
    misfit : callable
        Returns the reason why the kernel does not fit steps whose rows have this many pairs of
        token and head; an empty string if it fits.
    variant : callable
        Returns the variant for these steps. Longer rows use more tiles.
    """

    misfit: Callable[[Demand, int], str]
    variant: Callable[[Demand, int], AttendVariant]


def _portable_variant(demand: Demand, height: int) -> AttendVariant:
    tiles = tile_variants(demand.arch, demand.dtype, demand.cache_format)
    tile = next((tile for tile in tiles if tile.tile_m >= height), tiles[-1])
    # If every token needs at least two tiles, two programs read its keys together.
    return tile if demand.num_heads <= tile.tile_m else replace(tile, lanes=2)


_FEW_16 = AttendVariant(
    tile_m=16,
    tile_n=64,
    num_warps=8,
    num_stages=2,
    overhead=2,
    slack=6,
    family=FEW,
    split_tiles=32,
)
_FEW = (_FEW_16, replace(_FEW_16, tile_m=32, split_tiles=64))
_TILE = AttendVariant(
    tile_m=64,
    tile_n=64,
    num_warps=8,
    num_stages=2,
    min_units=4,
    overhead=6,
    family=TILE,
    split_tiles=80,
)


_FEW_FP8 = tuple(
    replace(
        _FEW_16,
        tile_m=pairs,
        tile_n=keys,
        num_stages=1,  # the portable kernel has no shared memory for two tiles of 128 keys
        overhead=overhead,
        family=FEW_FP8,
        split_tiles=split_tiles,
    )
    for pairs, keys, overhead, split_tiles in ((16, 128, 3, 16), (32, 128, 4, 16), (64, 64, 6, 64))
)
_TILE_FP8 = replace(_TILE, family=TILE_FP8)
_TILE_EXACT = replace(_TILE, family=TILE_EXACT, split_tiles=64)

_PLAIN = ("bf16", "fp16")
_E4M3_ROWS = ("fp8_e4m3", "fp8_block_token", "fp8_block_group")
_FP8_FORMATS = ("fp8_e4m3", "fp8_ds_mla", "fp8_block_token", "fp8_block_group")


def _hopper_misfit(demand: Demand, *kv_lora_ranks: int, formats: tuple[str, ...] = _PLAIN) -> str:
    if demand.arch != "sm90":
        return f"made for sm90, not {demand.arch}"
    if demand.dtype == "float32":
        return "made for 16-bit tensor cores, not float32"
    if demand.cache_format not in formats:
        made_for = ", ".join(formats)
        return f"made for {made_for} caches, not cache_format {demand.cache_format}"
    rank, rope_dim = demand.head_dims
    if rank not in kv_lora_ranks or rope_dim != 64:
        ranks = " or ".join(map(str, kv_lora_ranks))
        return f"made for kv_lora_rank {ranks} and qk_rope_head_dim 64, not {rank} and {rope_dim}"
    return ""


def _few_misfit(demand: Demand, height: int) -> str:
    most = _FEW[-1].tile_m
    too_many = f"serves at most {most} pairs of token and head" if height > most else ""
    return _hopper_misfit(demand, 512, 256) or too_many


def _few_fp8_misfit(demand: Demand, height: int) -> str:
    misfit = _hopper_misfit(demand, 512, formats=_FP8_FORMATS)
    if misfit:
        return misfit
    if not _tile_fp8_misfit(demand, height) and height > _FEW_FP8[0].tile_m:
        return f"slower than FP8 products for {height} pairs of token and head"
    if not _tile_exact_misfit(demand, height) and height > _FEW_FP8[1].tile_m:
        return f"slower than tiles of {_TILE_EXACT.tile_m} for {height} pairs of token and head"
    return ""


def _few_variant(_demand: Demand, height: int) -> AttendVariant:
    return next(tile for tile in _FEW if tile.tile_m >= height)


def _few_fp8_variant(_demand: Demand, height: int) -> AttendVariant:
    highest = _FEW_FP8[-1]
    # For more pairs, two programs read the same keys together.
    return next((tile for tile in _FEW_FP8 if tile.tile_m >= height), replace(highest, lanes=2))


def _tile_exact_misfit(demand: Demand, _height: int) -> str:
    misfit = _hopper_misfit(demand, 512, formats=_FP8_FORMATS)
    if misfit:
        return misfit
    if FORMATS[demand.cache_format].inline_scales and demand.dtype != "bfloat16":
        return f"has no shared memory for k_pe of bfloat16 in addition to queries of {demand.dtype}"
    return ""


def _tile_fp8_misfit(demand: Demand, _height: int) -> str:
    return _hopper_misfit(demand, 512, formats=_E4M3_ROWS) or (
        "" if demand.products == "fast" else f"rounds to FP8, where products are {demand.products}"
    )


def _tile_fp8_variant(_demand: Demand, height: int) -> AttendVariant:
    if height <= _TILE_FP8.tile_m:
        # Two tiles of 64 heads take 80 us; with an overhead of 6 they take 85 us.
        return replace(_TILE_FP8, overhead=12)
    return _with_lanes(_TILE_FP8, height)


def _with_lanes(tile: AttendVariant, height: int) -> AttendVariant:
    lanes = next(n for n in (1, 2, 4) if n * tile.tile_m >= height or n == 4)
    return replace(tile, lanes=lanes)


FAMILIES = {
    FEW: Family(misfit=_few_misfit, variant=_few_variant),
    TILE: Family(
        misfit=lambda demand, _height: _hopper_misfit(demand, 512),
        variant=lambda _demand, height: _with_lanes(_TILE, height),
    ),
    FEW_FP8: Family(misfit=_few_fp8_misfit, variant=_few_fp8_variant),
    TILE_FP8: Family(misfit=_tile_fp8_misfit, variant=_tile_fp8_variant),
    TILE_EXACT: Family(
        misfit=_tile_exact_misfit,
        variant=lambda _demand, height: _with_lanes(_TILE_EXACT, height),
    ),
    PORTABLE: Family(misfit=lambda _demand, _height: "", variant=_portable_variant),
}
"""Every family by its name, fastest first; the first family that fits a step serves it."""

MOST_PAIRS = 256
"""Number of pairs of a row above which no family changes its tiles."""


def serving_variant(demand: Demand, query_len: int) -> AttendVariant:
    """Return the variant for steps whose rows have up to `query_len` tokens."""
    height = demand.num_heads * query_len
    family = next(f for f in FAMILIES.values() if not f.misfit(demand, height))
    return family.variant(demand, height)


def portable_variant(demand: Demand, query_len: int) -> AttendVariant:
    """Return the portable kernel's variant for steps whose rows have up to `query_len` tokens."""
    return FAMILIES[PORTABLE].variant(demand, demand.num_heads * query_len)


def passed_over(demand: Demand, query_len: int) -> dict[str, str]:
    """Return, for each faster family than the one that serves, the reason why it does not fit."""
    reasons: dict[str, str] = {}
    for name, family in FAMILIES.items():
        reason = family.misfit(demand, demand.num_heads * query_len)
        if not reason:
            break
        reasons[name] = reason
    return reasons


def variants_by_query_len(demand: Demand, most_query_len: int) -> list[AttendVariant]:
    """Return the variant for each query length from 1; the last serves all longer queries."""
    last = min(most_query_len, -(-MOST_PAIRS // demand.num_heads))
    return [serving_variant(demand, length) for length in range(1, last + 1)]


def fixed_splits(variant: AttendVariant, max_rows: int, kv_lora_rank: int) -> int:
    """Return the most splits of a row whose bits must not depend on other rows (S-20).

    The result is a power of two, because kernels are compiled for each number.
    """
    split_bytes = max_rows * variant.tile_m * kv_lora_rank * 4
    return largest_power_of_two(min(FIXED_SPLIT_BYTES // split_bytes, MAX_FIXED_SPLITS))


def row_share(max_rows: int) -> int:
    """Return the programs of one row if `max_rows` rows share ``MAX_FIXED_SPLITS`` programs.

    The result is a power of two, because kernels are compiled for each number.
    """
    return largest_power_of_two(MAX_FIXED_SPLITS // max_rows)
