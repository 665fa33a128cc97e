"""The constants that affect the code of a kernel; tests compare launches with compiled variants."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from paged_mla_optimized.planning.axes import SERVED
from paged_mla_optimized.triton_compat.kernels import is_gluon, name_of

_NUMBERS = {
    *("num_heads", "block_size", "BLOCK_SIZE", "block_rows", "SEARCH_STEPS", "ROWS", "ALL_ROWS"),
    *("WINDOW", "PROGRAMS", "HEADS", "TILES", "L2_KEYS", "scale", "COLUMNS", "WORLD", "INTERLEAVE"),
}
_FEW_OR_NONE = {"TREE_WORDS", "FIXED_SPLITS", "ROW_SHARE", "SCALES"}  # 0 removes code
_WIDTHS = {"R", "P", "LINE", "SHARES", "NOPE", "WIDE", "ROPE", "V"}


def shape(kernel: Any, constants: Mapping[str, Any]) -> Hashable:
    """Return a key of the constants that affect the code of a kernel.

    The key contains constants with their values, but not the numbers in ``_NUMBERS`` and strides.
    It contains only whether a constant in ``_FEW_OR_NONE`` is above 0. It leaves out the widths of
    a portable kernel, unless they are those of ``SERVED``. For a kernel with ``WIDE``, it contains
    whether ``NOPE`` is larger.
    """
    kept: dict[str, Any] = {}
    is_whole = is_gluon(kernel) or (constants.get("R"), constants.get("P", 64)) == SERVED
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
    return name_of(kernel), frozenset(kept.items())
