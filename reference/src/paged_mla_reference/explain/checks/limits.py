"""Limit the size of a dump that is explained.

The size of the file is no limit: a small file can name one block a million times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import InvalidArgument

MOST_NUMBERS = 1 << 30
"""The most numbers in the gathered keys of one row: 8 GiB in float64."""
MOST_PRODUCTS = 1 << 42
"""The most products in one output of the step: about one hour on one core.

An explanation computes many outputs.
"""


def check_keys(dump: Dump) -> None:
    """Check that the keys of each row fit in memory when they are gathered.

    Raises
    ------
    InvalidArgument
        A row has more than ``MOST_NUMBERS`` numbers in its keys.
    """
    _, keys = _lengths(dump)
    most = MOST_NUMBERS // dump.problem.dims.cached_dim
    if keys.max(initial=0) > most:
        row = int(keys.argmax())
        given = f"{keys[row]:,} keys in row {row}"
        raise InvalidArgument("seq_lens", given, f"at most {most:,} with these dims")


def check_pairs(dump: Dump) -> None:
    """Check that the output of all rows can be computed in bounded time.

    Raises
    ------
    InvalidArgument
        The output takes more than ``MOST_PRODUCTS`` products.
    """
    dims = dump.problem.dims
    pairs = sum(int(q) * int(k) for q, k in zip(*_lengths(dump), strict=True))
    most = MOST_PRODUCTS // (dims.num_heads * dims.cached_dim)
    if pairs > most:
        given = f"{pairs:,} pairs of a query token and a key"
        allowed = f"at most {most:,} with these dims; dump fewer rows, or use --token"
        raise InvalidArgument("seq_lens", given, allowed)


def _lengths(dump: Dump) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of queries and of keys of each row.

    They are empty for a dump without lengths or a block table. A number of queries below 0 is
    returned as 0, and so is a number of keys that no rule allows.
    """
    arrays = dump.arrays
    if not {"cu_seqlens_q", "seq_lens", "block_table"} <= arrays.keys():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    room = arrays["block_table"].shape[1] * dump.problem.block_size  # the rules allow no more keys
    keys = arrays["seq_lens"].astype(np.int64)
    queries = np.diff(arrays["cu_seqlens_q"].astype(np.int64))
    return np.maximum(queries, 0), np.where((keys > 0) & (keys <= room), keys, 0)
