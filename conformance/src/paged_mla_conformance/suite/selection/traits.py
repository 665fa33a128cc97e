"""The traits of a test: plain numbers and words that describe its case.

Failures of one bug have something in common that other tests do not have. A report searches for it
among these traits.
"""

from __future__ import annotations

from typing import Any

from paged_mla_conformance.suite.selection.core import Run
from paged_mla_shared.cases import Case, PrefillCase, Row
from paged_mla_shared.formats import format_of
from paged_mla_shared.problem import Mask

Traits = dict[str, Any]
"""Values that JSON can represent, by their names; unknown traits are absent."""


def traits_of_case(run: Run, case: Case, dtype: str) -> Traits:
    """Return the traits of a case in an element type.

    ``keys`` lists the lengths of rows that have query tokens. ``seen`` lists how many keys query
    tokens see; it includes the fewest and the most of each row, and a tree mask counts as causal.
    Both are sorted. ``longest`` and ``shortest`` are the ends of ``keys``, and ``fewest`` is the
    first of ``seen``. They are 0 if the list is empty. ``work`` estimates the size of the case: it
    counts pairs of a query token and a key in each head, and the elements of a large cache.
    """
    dims, mask = run.dims, case.mask
    if isinstance(case, PrefillCase):
        dims = case.dims or dims
        mask = Mask.CAUSAL if case.causal else Mask.NON_CAUSAL
    rows = [row for step in case.steps for row in step]
    live = [row for row in rows if row.seq_len and row.query_len]
    keys = sorted({row.seq_len for row in live})
    seen = sorted(set().union(*(_seen(row, mask) for row in live)))
    heads = case.num_heads or dims.num_heads
    pairs = sum(row.seq_len * row.query_len for row in rows)
    return {
        "group": case.group,
        "dtype": dtype,
        "cache_format": format_of(dtype, case.cache_format),
        "heads": heads,
        "rows": max(map(len, case.steps)),
        "keys": keys,
        "longest": max(keys, default=0),
        "shortest": min(keys, default=0),
        "seen": seen,
        "fewest": min(seen, default=0),
        "queries": case.max_query_len,
        "tokens": max(
            sum(row.query_len for row in step) + case.padded_tokens for step in case.steps
        ),
        "block_size": case.block_size,
        "partial_blocks": any(row.seq_len % case.block_size for row in live),
        "mask": str(mask),
        "mask_spelling": str(case.mask_spelling) if mask is Mask.TREE else "none",
        "table_tail": str(case.table_tail),
        "query_scale": case.query_scale,
        "own_softmax_scale": case.softmax_scale is not None,
        "mixed": "mixed" in case.required_features,
        "padded_tokens": case.padded_tokens > 0,
        "rows_without_keys": any(row.seq_len == 0 for row in rows),
        "rows_without_queries": any(row.query_len == 0 for row in rows),
        "queries_without_keys": any(row.query_len > row.seq_len for row in rows),
        "tokens_of_no_row": bool(case.padded_tokens)
        or any(row.query_len and not row.seq_len for row in rows),
        "strided_inputs": case.strided_inputs,
        "strided_cache": bool(case.token_padding or case.block_padding),
        "large_offsets": case.placed_high,
        "explicit_slots": case.explicit_slots,
        "rope": case.rope is not None,
        "steps": len(case.steps),
        "shared_prefixes": any(row.shares_prefix_of is not None for row in rows),
        "equal_keys": case.equal_keys,
        "odd_values": case.odd_values,
        "scaled_latents": (case.latent_scale, case.key_scale) != (1, 1),
        "own_cache_scale": case.cache_scale != 1,
        "spare": case.spare > 1,
        "work": max(pairs, 1) * heads + case.cache_elements,
    }


def _seen(row: Row, mask: Mask) -> set[int]:
    """Return how many keys the first and the last two query tokens of a row see.

    A tree mask counts as causal.
    """
    if mask is Mask.NON_CAUSAL or row.query_len == 1:
        return {row.seq_len}
    counts = (row.seq_len - row.query_len + 1, row.seq_len - 1, row.seq_len)
    return {max(count, 0) for count in counts}
