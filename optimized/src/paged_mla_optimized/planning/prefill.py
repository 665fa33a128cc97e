"""Choose the tiles of prefill; this module is a pure table and needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from paged_mla_optimized.config.architectures import INTERPRETER


@dataclass(frozen=True, kw_only=True)
class PrefillVariant:
    """Tile sizes and launch options of the portable kernel.

    Parameters
    ----------
    tile_m : int
        Tokens of one query tile; a power of two >= 16.
    tile_n : int
        Keys of one key tile; a power of two >= 16.
    num_warps, num_stages : int
        Triton's launch options.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


HOPPER_DIMS = (128, 64, 128)
"""Head sizes of ``kernels/hopper/prefill.py``: of keys without and with position, of values."""

_INTERPRETED = PrefillVariant(tile_m=32, tile_n=32, num_warps=1, num_stages=1)
_FLOAT32 = PrefillVariant(tile_m=32, tile_n=16, num_warps=8, num_stages=2)
_SMALL = PrefillVariant(tile_m=64, tile_n=32, num_warps=4, num_stages=2)
_LARGE = PrefillVariant(tile_m=128, tile_n=64, num_warps=8, num_stages=2)
_WIDE = PrefillVariant(tile_m=64, tile_n=32, num_warps=8, num_stages=2)
_TABLE = {
    "sm80": _LARGE,
    "sm86": _SMALL,
    "sm89": _SMALL,
    "sm90": _LARGE,
    "sm100": _LARGE,
    "sm120": _SMALL,
}


def prefill_variant(arch: str, dtype: str, head_dims: tuple[int, int, int]) -> PrefillVariant:
    """Return the tiles for an architecture, a dtype and head sizes (N, P, V)."""
    if arch == INTERPRETER:
        return _INTERPRETED
    if dtype == "float32":
        return _FLOAT32
    return _WIDE if sum(head_dims) > sum(HOPPER_DIMS) else _TABLE[arch]


def is_for_hopper(arch: str, dtype: str, head_dims: tuple[int, int, int]) -> bool:
    """Return whether the Gluon kernel serves these heads, if it can address their tensors."""
    return arch == "sm90" and dtype != "float32" and head_dims == HOPPER_DIMS
