"""Lengths of a step as the host knows them, beside those on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_optimized.checks import check_capacity
from paged_mla_optimized.config import MlaConfig
from paged_mla_shared.errors import InvalidArgument


@dataclass(frozen=True)
class Told:
    """What the host knows of a step.

    Parameters
    ----------
    query_lens : int64 [B]
        What ``cu_seqlens_q`` holds.
    max_seq_lens : int64 [B]
        What ``seq_lens`` holds, or more.
    """

    query_lens: NDArray[np.int64]
    max_seq_lens: NDArray[np.int64]

    def check(self, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> None:
        """Raise ``InvalidArgument`` unless this is true of what the device has."""
        held = np.diff(cu_seqlens_q)
        differ = self.query_lens != held
        if differ.any():
            row = int(differ.argmax())
            given = f"{self.query_lens[row]} in row {row}"
            allowed = f"{held[row]}, as cu_seqlens_q has on the device"
            raise InvalidArgument("query_lens", given, allowed)
        short = self.max_seq_lens < seq_lens
        if short.any():
            row = int(short.argmax())
            given = f"{self.max_seq_lens[row]} in row {row}"
            allowed = f"at least {seq_lens[row]}, as seq_lens has on the device"
            raise InvalidArgument("max_seq_lens", given, allowed)


def told_lens(
    config: MlaConfig,
    num_rows: int,
    num_tokens: int,
    *,
    query_lens: Sequence[int] | None,
    max_seq_lens: Sequence[int] | None,
    absorbed_rows: int | None,
    max_query_len: int | None,
) -> Told | None:
    """Return lengths as arrays, once they fit together and the step; ``None`` without `query_lens`.

    Raises
    ------
    InvalidArgument
        They are not lengths of so many rows, or no rule allows them, or what goes with them.
    """
    if query_lens is None:
        for name, given in (("max_seq_lens", max_seq_lens), ("absorbed_rows", absorbed_rows)):
            if given is not None:
                raise InvalidArgument(name, given, "None without query_lens")
        return None
    if max_query_len is not None:
        raise InvalidArgument("max_query_len", max_query_len, "None beside query_lens")
    check_capacity(config, num_rows, num_tokens)  # lengths are held to it
    if max_seq_lens is None:
        raise InvalidArgument("max_seq_lens", None, "given where query_lens are")
    queries = _lengths("query_lens", query_lens, num_rows)
    keys = _lengths("max_seq_lens", max_seq_lens, num_rows)
    short = keys < queries
    may_be_short = config.mask == "non_causal"
    if not may_be_short and short.any() and (short := short & (keys > 0)).any():
        row = int(short.argmax())
        told = f"{keys[row]} in row {row}"
        raise InvalidArgument("max_seq_lens", told, f"0, or at least {queries[row]} queries")
    if queries.sum() > num_tokens:
        raise InvalidArgument(
            "query_lens", f"{queries.sum()} in all", f"up to num_tokens = {num_tokens}"
        )
    longest = config.max_model_len
    if keys.max(initial=0) > longest:
        raise InvalidArgument("max_seq_lens", keys.max(), f"up to max_model_len = {longest}")
    return Told(queries, keys)


def _lengths(name: str, given: Any, num_rows: int) -> NDArray[np.int64]:
    """Return lengths of rows, int64 [B], of a sequence on the host."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):  # on a device, or of several lengths
        kind = f"a {type(given).__name__}"
        raise InvalidArgument(name, kind, "a sequence of integers on the host") from None
    if array.shape != (num_rows,):
        raise InvalidArgument(name, f"shape {array.shape}", f"one for each of {num_rows} rows")
    if num_rows and array.dtype.kind not in "iu":
        raise InvalidArgument(name, f"elements of {array.dtype}", "integers")
    lengths = array.astype(np.int64)
    unsigned = lengths.view(np.uint64)  # those below 0 are the largest
    if unsigned.max(initial=0) >= 2**31:  # sums of such could pass int64
        raise InvalidArgument(name, array[unsigned.argmax()], "0 to 2 ** 31 - 1")
    return lengths
