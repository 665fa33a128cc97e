"""Which kernel variant serves a problem: a pure table, evaluated with no GPU and no torch.

The launcher and the ahead-of-time compiler both ask here, so every variant that can run has been
compiled and held against its architecture's limits.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_MEMORY = {
    "sm80": 166_912,
    "sm86": 101_376,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm120": 101_376,
}
"""Bytes of shared memory one program may use."""

INTERPRETER = "interpreter"
"""Name of Triton's CPU interpreter where an architecture is asked for."""


@dataclass(frozen=True, kw_only=True)
class AttendVariant:
    """Shape of one attend launch.

    Parameters
    ----------
    tile_m : int
        (token, head) pairs of one query tile; a power of two >= 16.
    tile_n : int
        Keys of one key tile; a power of two >= 16.
    num_warps, num_stages : int
        Triton's launch options.
    programs_per_sm : int
        The grid has this many programs for each multiprocessor.
    lanes : int
        Query tiles that walk the same keys side by side, so that the second read of a key hits L2.
    min_units : int
        Key tiles below which a share of the work is not cut further.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    lanes: int = 1
    min_units: int = 2

    def parts(self, num_sms: int) -> int:
        """Return how many shares the work is cut into on a device of `num_sms`."""
        return max(1, num_sms * self.programs_per_sm // self.lanes)


def attend_variant(
    arch: str, dtype: str, num_heads: int, max_query_len: int, kv_lora_rank: int
) -> AttendVariant:
    """Return the variant for a problem.

    Parameters
    ----------
    arch : str
        Key of :data:`SHARED_MEMORY`, or :data:`INTERPRETER`.
    dtype : str
        "float32", "float16" or "bfloat16".
    num_heads, max_query_len : int
        Heads, and the longest query a row can have; together the height of a row's queries.
    kv_lora_rank : int
        R.
    """
    tile_m = min(64, max(16, _power_of_two(num_heads * max_query_len)))
    lanes = 2 if num_heads > 64 else 1
    if arch == INTERPRETER:
        return AttendVariant(
            tile_m=tile_m, tile_n=32, num_warps=1, num_stages=1,
            programs_per_sm=5 * lanes, lanes=lanes, min_units=1,
        )  # fmt: skip
    tile_n, num_warps = 32, 8
    return AttendVariant(
        tile_m=tile_m, tile_n=tile_n, num_warps=num_warps, num_stages=2, lanes=lanes
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
