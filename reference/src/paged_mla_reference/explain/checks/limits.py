"""How large a dump may be for an explanation: a small file can name one block a million times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import InvalidArgument

MOST_NUMBERS = 1 << 30
"""Of the keys of one row, gathered: 8 GiB in float64."""
MOST_PRODUCTS = 1 << 42
"""Of one answer to the step, of which an explanation computes many: about an hour of one core."""


def check_keys(dump: Dump) -> None:
    """Check that the keys of each row can be gathered.

    Raises
    ------
    InvalidArgument
    """
    _, keys = _lengths(dump)
    most = MOST_NUMBERS // dump.problem.dims.cached_dim
    if keys.max(initial=0) > most:
        row = int(keys.argmax())
        given = f"{keys[row]:,} keys in row {row}"
        raise InvalidArgument("seq_lens", given, f"at most {most:,} with these dims")


def check_pairs(dump: Dump) -> None:
    """Check that the answer to all rows can be computed.

    Raises
    ------
    InvalidArgument
    """
    dims = dump.problem.dims
    pairs = sum(int(q) * int(k) for q, k in zip(*_lengths(dump), strict=True))
    most = MOST_PRODUCTS // (dims.num_heads * dims.cached_dim)
    if pairs > most:
        given = f"{pairs:,} pairs of a query and a key"
        allowed = f"at most {most:,} with these dims: a dump of fewer rows, or --token"
        raise InvalidArgument("seq_lens", given, allowed)


def _lengths(dump: Dump) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return queries and keys of each row that may be computed; none of a dump without lengths."""
    arrays = dump.arrays
    if not {"cu_seqlens_q", "seq_lens", "block_table"} <= arrays.keys():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    room = arrays["block_table"].shape[1] * dump.problem.block_size  # no rule allows longer rows
    keys = arrays["seq_lens"].astype(np.int64)
    queries = np.diff(arrays["cu_seqlens_q"].astype(np.int64))
    return np.maximum(queries, 0), np.where((keys > 0) & (keys <= room), keys, 0)
