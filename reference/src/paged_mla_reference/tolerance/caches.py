"""Comparison of a cache with the expected cache after an append, and of inputs and reads.

Every byte must be exact, except for bytes that depend on a rotation. A rotated element may be
rounded to its other neighbor (S-12). If a cache computes its scales from the data, and such an
element is the largest of its scale group, the group has another scale. Its codes are then equal or
adjacent to the expected codes.

Rule ids: S-1, S-9, S-10, S-11, S-12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.e4m3 import LARGEST, decode
from paged_mla_reference.rules.rounding import widen
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.compare import Check, Mismatch, first, same_form
from paged_mla_reference.tolerance.pattern import describe
from paged_mla_reference.tolerance.rotation_tolerance import are_neighbours, scales_are_near
from paged_mla_shared.dtypes import bits, dtype_name
from paged_mla_shared.layout import CacheLayout
from paged_mla_shared.operation import Operation
from paged_mla_shared.problem import Batch, Problem


@dataclass(frozen=True)
class Rotated:
    """Slots whose keys were rotated, not copied.

    Parameters
    ----------
    slots : int64 [N]
    dtype : str
        The type to which keys are rounded before the cache encodes them.
    """

    slots: NDArray[np.int64]
    dtype: str

    @classmethod
    def of(cls, problem: Problem, slots: NDArray[np.int64]) -> Rotated | None:
        """Return the slots that an append wrote, or ``None`` if the problem has no rope."""
        return None if problem.rope is None else cls(slots, problem.dtype)


@dataclass(frozen=True)
class Writer:
    """The tokens of a step and the slots to which they are written.

    Parameters
    ----------
    batch : Batch
    slots : int64 [T]
        The slot of each token, -1 for none.
    """

    batch: Batch
    slots: NDArray[np.int64]

    def describe(self, wrong_slots: NDArray[np.int64]) -> str:
        """Describe the common properties of the tokens whose slots are in `wrong_slots`."""
        tokens = np.isin(self.slots, wrong_slots) & (self.slots >= 0)
        if not tokens.any():
            return "no token of the step has such a slot"
        return f"written by tokens of the step: {describe(tokens, self.batch)}"


def check_cache(
    layout: CacheLayout,
    block_ids: NDArray[np.int64],
    actual: NDArray[np.uint8],
    expected: NDArray[np.uint8],
    writer: Writer | None = None,
    *,
    rotated: Rotated | None = None,
) -> list[Check]:
    """Check every byte of the cache after an append (S-10).

    The ``k_pe`` of slots in `rotated` may have the error of a rounded rotation
    (:func:`paged_mla_reference.tolerance.budgets.rotation_budget`), and scales that depend on these
    keys may have the resulting error. All other bytes must be exact.

    Parameters
    ----------
    layout : CacheLayout
    block_ids : int64 [n]
        The compared blocks.
    actual, expected : uint8 [n, block_bytes]
    writer : Writer, optional
        With it, a message describes the tokens that write the wrong slots.
    rotated : Rotated, optional

    Raises
    ------
    Mismatch
    """
    if actual.shape != expected.shape or actual.dtype != np.uint8:
        detail = f"{actual.dtype}{actual.shape}, expected uint8{expected.shape}"
        raise Mismatch("S-10", "read_cache", detail)
    allowed, checks = allowed_bytes(layout, block_ids, actual, expected, rotated)
    if allowed.all():
        return checks
    block, byte = first(~allowed)
    detail = (
        f"{int((~allowed).sum())} bytes wrong, first in block {int(block_ids[block])}, "
        f"{_place_of(layout, byte)}: "
        f"{actual[block, byte]:#04x}, expected {expected[block, byte]:#04x}"
    )
    if writer is not None:
        inside, slot = np.nonzero((~layout.rows(allowed.view(np.uint8)).view(bool)).any(axis=-1))
        detail += f"; {writer.describe(block_ids[inside] * layout.block_size + slot)}"
    raise Mismatch("S-10", "cache", detail)


def allowed_bytes(
    layout: CacheLayout,
    block_ids: NDArray[np.int64],
    actual: NDArray[np.uint8],
    expected: NDArray[np.uint8],
    rotated: Rotated | None,
) -> tuple[NDArray[np.bool_], list[Check]]:
    """Return which bytes of raw blocks are allowed, and the comparisons made (S-10, S-12)."""
    allowed = actual == expected
    checks = [Check("cache bytes", 0.0, 0.0)]
    if rotated is not None:
        is_rotated = np.isin(layout.slots(block_ids), rotated.slots)
        keeps_scale = np.ones_like(is_rotated)
        if layout.format.scales_per_block(layout.block_size):
            turned = _turned(layout, is_rotated, rotated.dtype, actual, expected)
            _accept_scales(layout, turned, allowed, actual, expected)
            keeps_scale = ~np.repeat(turned, layout.block_size // turned.shape[1], axis=1)
        asked = is_rotated & keeps_scale
        checks.append(_accept_rotated(layout, asked, allowed, actual, expected))
    return allowed, checks


def _place_of(layout: CacheLayout, byte: int) -> str:
    """Describe the place of a byte of a raw block."""
    if byte >= layout.block_stride:
        return f"byte {byte - layout.block_stride} of its scales"
    token, offset = divmod(byte, layout.token_stride)
    if token >= layout.block_size or offset >= layout.token_bytes:
        return f"padding byte {byte}"
    return f"token {token}, byte {offset} of its row"


def _accept_rotated(
    layout: CacheLayout,
    is_rotated: NDArray[np.bool_],
    allowed: NDArray[np.bool_],
    actual: NDArray[np.uint8],
    expected: NDArray[np.uint8],
) -> Check:
    """Mark the bytes of ``k_pe`` whose values are within budget as allowed; return the worst value.

    `is_rotated` [blocks, block_size] selects the slots. The function marks no byte if too many
    elements are rounded to their other neighbor.
    """
    mine, theirs = layout.field(actual, "k_pe"), layout.field(expected, "k_pe")
    if not mine.size:
        return Check("rotated k_pe", 0.0, 0.0)
    a, b = widen(mine), widen(theirs)
    finite = np.isfinite(a) & np.isfinite(b) & is_rotated[..., None]
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    error, budget = np.abs(a - b), budgets.rotation_budget(b, dtype_name(mine.dtype))
    fine = np.where(finite, error <= budget, np.isnan(mine) & np.isnan(theirs))  # with any bits
    turned = int((error > 0).sum())
    if mine.dtype.itemsize > 2 or turned <= budgets.most_turned(int(finite.sum())):
        marks = layout.field(allowed.view(np.uint8), "k_pe").view(np.uint8)
        marks |= np.repeat(fine & is_rotated[..., None], mine.dtype.itemsize, axis=-1)
    at = np.unravel_index(np.argmax(error / budget), error.shape)
    return Check("rotated k_pe", float(error[at]), float(budget[at]))


def _turned(
    layout: CacheLayout,
    is_rotated: NDArray[np.bool_],
    dtype: str,
    actual: NDArray[np.uint8],
    expected: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Return which scales [blocks, G] are explained by another rounding of a key of `dtype`.

    `is_rotated` [blocks, block_size] selects the slots of rotated keys.
    """
    right, mine = layout.scales(expected), layout.scales(actual)
    sizes = np.abs(widen(decode(layout.field(expected, "k_pe").view(np.uint8))))
    is_largest = (sizes == LARGEST).any(axis=-1) & is_rotated
    tokens_of_a_scale = layout.block_size // right.shape[1]
    turned: NDArray[np.bool_] = is_largest.reshape(*right.shape, tokens_of_a_scale).any(axis=-1)
    turned &= differs(mine, right)
    turned[turned] = scales_are_near(mine[turned], right[turned], dtype)
    return turned


def _accept_scales(
    layout: CacheLayout,
    turned: NDArray[np.bool_],
    allowed: NDArray[np.bool_],
    actual: NDArray[np.uint8],
    expected: NDArray[np.uint8],
) -> None:
    """Mark the scales in `turned` [blocks, G] as allowed, and adjacent codes of their tokens."""
    marks = allowed.view(np.uint8)
    layout.scale_bytes(marks)[turned] = 1
    of_token = np.repeat(turned, layout.block_size // turned.shape[1], axis=1)
    for name in ("ckv", "k_pe"):
        codes = (layout.field(blocks, name).view(np.uint8) for blocks in (actual, expected))
        mine = layout.field(marks, name).view(np.uint8)
        mine |= are_neighbours(*codes) & of_token[..., None]


def differs(mine: NDArray[Any], theirs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the mask of the elements in which two arrays differ in at least one bit."""
    return np.asarray(bits(np.ascontiguousarray(mine)) != bits(np.ascontiguousarray(theirs)))


def check_left(
    batch: Batch, pairs: Sequence[tuple[str, NDArray[Any], NDArray[Any]]]
) -> list[Check]:
    """Check that a call did not change its inputs (S-10).

    Parameters
    ----------
    batch : Batch
    pairs : sequence of tuple
        For each input its name, the array after the call, and the array before the call, both
        [T, width].

    Raises
    ------
    Mismatch
    """
    for name, after, before in pairs:
        wrong = differs(after, before)
        if wrong.any():
            at = first(wrong)
            where = describe(np.asarray(wrong.any(axis=1)), batch)
            detail = f"{after[at]} at {at} of {name}, given {before[at]}; {where}"
            raise Mismatch("S-10", name, detail, at)
    return [Check("inputs", 0.0, 0.0)]


def check_read(operation: Operation, actual: Any, expected: Any) -> list[Check]:
    """Compare the arrays that an operation reads from the cache, bit for bit (S-1, S-9).

    The first axis of the arrays counts rows of the step or their tokens.

    Raises
    ------
    Mismatch
    """
    both = [found if isinstance(found, tuple) else (found,) for found in (actual, expected)]
    for what, mine, theirs in zip(operation.arrays, *both, strict=True):
        same_form(what, mine, theirs.shape, dtype_name(theirs.dtype))
        wrong = (bits(mine) != bits(theirs)).any(axis=tuple(range(1, mine.ndim)))
        if wrong.any():
            lines = np.flatnonzero(wrong)
            detail = f"{len(lines)} of {len(wrong)} lines wrong, {lines[0]} to {lines[-1]}"
            raise Mismatch("S-1", f"{operation.name} {what}", detail, (int(lines[0]),))
    return [Check(f"bytes of {operation.name}", 0.0, 0.0)]
