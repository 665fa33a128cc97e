"""Cases of illegal steps: a kernel accesses only memory of the legal rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged_mla_shared.cases.case import Case, Row, SlotOrder, TableTail
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing

GROUP = "bounded"
PRODUCTION = {"rows": 300, "tree": 10}
MOST, LEAST = 2**31 - 1, -(2**31)


@dataclass(frozen=True, kw_only=True)
class IllegalCase(Case):
    """A legal case, and the changes that make its metadata illegal.

    Parameters
    ----------
    starts : tuple of (int, int)
        Indices of ``cu_seqlens_q``, and their new values.
    lengths : tuple of (int, int)
        Rows, and their new values in ``seq_lens``. A FULL mask has as many columns.
    blocks : tuple of (int, int, int or None)
        Rows, indices among the blocks that a row uses (-1 is the last), and the new ids in the
        table; ``None`` is the first id after the cache.
    slots : tuple of (int, int or None)
        Tokens, and their new slots; ``None`` is the first slot after the cache.
    columns : int or None
        The number of columns of the table that are kept.
    elements : int or None
        The number of elements of the mask that are kept, or, if negative, that are removed.
    """

    starts: tuple[tuple[int, int], ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    blocks: tuple[tuple[int, int, int | None], ...] = ()
    slots: tuple[tuple[int, int | None], ...] = ()
    columns: int | None = None
    elements: int | None = None


_ROWS = (Row(70, 3), Row(10, 10), Row(5, 1), Row(33, 3))  # cu_seqlens_q: 0, 3, 13, 14, 17
_MANY = tuple(Row(20 + i % 50, 1 + i % 4) for i in range(300))


def _illegal(name: str, why: str, rows: tuple[Row, ...] = _ROWS, **more: Any) -> IllegalCase:
    """Return a case of the group; `more` are fields of :class:`IllegalCase`."""
    return IllegalCase(
        group=GROUP,
        name=name,
        why=why,
        rules=("S-1", "S-2", "S-6", "S-9", "S-10", *(("S-14",) if "mask_spelling" in more else ())),
        rows=rows,
        features=(GROUP,),
        **{"num_heads": 2, "table_tail": TableTail.FOREIGN, **more},
    )


_SHORT = "a causal row with fewer keys than queries, whose first positions are negative"
_LENGTH = "a length that no row can have"
_LONG = "a length for which the row has no blocks in the table"
_STARTS = "tokens that are outside the step, or in two rows"
_BLOCK = "a block that the cache does not have"
_SLOT = "a slot of slot_mapping that the cache does not have"
_TREE = "draft trees that do not fit their mask"

CASES = (
    *(
        _illegal(f"short-{name}", _SHORT, lengths=lengths, **more)
        for name, lengths, more in (
            ("middle", ((1, 4),), {}),
            ("first", ((0, 2),), {}),
            ("last", ((3, 2),), {}),
            ("by-one", ((1, 9),), {}),
            ("one-key", ((1, 1),), {}),
            ("bs1", ((1, 4), (3, 1)), {"block_size": 1}),
            ("bs16", ((1, 4), (3, 1)), {"block_size": 16}),
            ("tail-int32_max", ((1, 4),), {"table_tail": TableTail.INT32_MAX}),
            ("rope", ((1, 4),), {"rope": Rope(RopePairing.INTERLEAVED)}),
            ("strided", ((1, 4),), {"strided_inputs": True}),
        )
    ),
    _illegal(
        "short-300-rows",
        _SHORT,
        _MANY,
        lengths=tuple((i, 1) for i in range(300) if i % 7 == 3 and i % 4),
        num_heads=1,
        is_slow=True,
    ),
    *(
        _illegal(f"length-{name}", _LENGTH, lengths=lengths, mask=mask)
        for name, lengths, mask in (
            ("negative", ((1, -1),), Mask.CAUSAL),
            ("least", ((1, LEAST),), Mask.CAUSAL),
            ("decode-negative", ((2, -5),), Mask.CAUSAL),
            ("non-causal-negative", ((1, -3), (2, LEAST)), Mask.NON_CAUSAL),
        )
    ),
    *(
        _illegal(f"length-{name}", _LONG, lengths=lengths, **more)
        for name, lengths, more in (
            ("past-the-model", ((2, 71),), {}),
            ("most", ((2, MOST),), {}),
            ("past-the-table", ((2, 400),), {"spare": 9}),
            ("non-causal-past-the-table", ((2, 400),), {"spare": 9, "mask": Mask.NON_CAUSAL}),
        )
    ),
    *(
        _illegal(
            f"table-of-width-{width}",
            "rows with more blocks than the table has columns",
            columns=width,
        )
        for width in (0, 1)
    ),
    *(
        _illegal(f"starts-{name}", _STARTS, starts=starts, mask=mask)
        for name, starts, mask in (
            ("below-0", ((0, -2),), Mask.CAUSAL),
            ("least", ((0, LEAST),), Mask.CAUSAL),
            ("end-below-0", ((1, -1),), Mask.CAUSAL),
            ("late", ((0, 1),), Mask.CAUSAL),
            ("falling", ((1, 14),), Mask.CAUSAL),
            ("falling-far", ((2, MOST),), Mask.CAUSAL),
            ("wrapping", ((0, LEAST), (1, MOST)), Mask.CAUSAL),
            ("past-the-tokens", ((4, 18),), Mask.CAUSAL),
            ("far-past-the-tokens", ((4, MOST),), Mask.CAUSAL),
            ("non-causal-below-0", ((0, -2),), Mask.NON_CAUSAL),
            ("non-causal-falling", ((1, 14),), Mask.NON_CAUSAL),
        )
    ),
    *(
        _illegal(f"block-{name}", _BLOCK, blocks=blocks, **more)
        for name, blocks, more in (
            ("negative", ((0, -1, -1),), {}),
            ("negative-in-the-context", ((0, 0, -7),), {}),
            ("least", ((1, 0, LEAST),), {}),
            ("past-the-cache", ((0, -1, None),), {}),
            ("past-the-cache-in-the-context", ((0, 0, None),), {}),
            ("most", ((0, -1, MOST), (2, 0, MOST)), {}),
            ("bs1", ((0, -1, -1), (3, -1, None)), {"block_size": 1}),
            ("non-causal", ((0, -1, -1), (3, 0, None)), {"mask": Mask.NON_CAUSAL}),
            ("rope", ((0, -1, -1),), {"rope": Rope(RopePairing.NEOX)}),
        )
    ),
    *(
        _illegal(
            f"slot-{name}", _SLOT, slots=slots, explicit_slots=True, slot_order=SlotOrder.TABLE
        )
        for name, slots in (
            ("past-the-cache", ((0, None),)),
            ("past-32-bits", ((1, 2**32 + 5), (14, 2**31))),
            ("past-any-offset", ((1, 2**62), (13, 2**63 - 1))),
            ("below", ((4, -2), (0, -65))),
            ("least", ((2, -(2**63)), (16, LEAST))),
        )
    ),
    *(
        _illegal(
            f"tree-{spelling}-{name}", _TREE, mask=Mask.TREE, mask_spelling=spelling, **changes
        )
        for spelling in MaskSpelling
        for name, changes in (
            ("short", {"lengths": ((1, 4),)}),
            ("negative", {"lengths": ((1, -1),)}),
            ("past-the-table", {"lengths": ((2, 400),), "spare": 9}),
            ("too-many-nodes", {"starts": ((1, 14),)}),
            ("block-negative", {"blocks": ((0, -1, -1),)}),
        )
    ),
    *(
        _illegal(
            f"tree-{spelling}-mask-{name}",
            _TREE,
            mask=Mask.TREE,
            mask_spelling=spelling,
            elements=elements,
        )
        for spelling in (MaskSpelling.QLEN, MaskSpelling.FULL)
        for name, elements in (("one-less", -1), ("of-one", 1), ("empty", 0))
    ),
)
