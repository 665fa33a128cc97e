"""One step as an engine describes it, with a block table or a map from requests to slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.arguments import device_of, integer
from paged_mla_shared.errors import InvalidArgument

_NO_BLOCK = -1  # pads the rows of a table on the host to the longest row


@dataclass(frozen=True, eq=False)
class RequestMap:
    """The slot of every token of every request, as engines store it instead of a block table.

    Parameters
    ----------
    req_to_token : int32 [requests, tokens]
        Slot of each token of each request; the last axis may have any stride. The slots of a block
        must be consecutive: only the first slot of each block is read.
    request_ids : int32 or int64 [B]
        Line of `req_to_token` of each row; not read for rows with a ``seq_len`` of 0.

    Notes
    -----
    These are SGLang's ``req_to_token`` and ``req_pool_indices``. Rules S-1 and S-9 apply.
    """

    req_to_token: torch.Tensor
    request_ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class MlaStep:
    """One step: the argument of ``plan``, ``check`` and ``explain``.

    The tensors are on the device of the instance that plans the step. Lengths are read on the
    device only, so planning does not wait for them. :meth:`from_host` returns a step of lengths
    on the host.

    Parameters
    ----------
    cu_seqlens_q : int32 [B + 1]
        Prefix sums of query lengths, from 0; tokens at or past the last entry are padding (S-6).
    seq_lens : int32 [B]
        Tokens of each row, including those of this step; 0 marks a padded row (S-2). With the mask
        "non_causal" a row may have fewer keys than queries; its first queries then have no slot.
    block_table : int32 [B, M], or RequestMap
        ``attend`` reads it again, so it must stay unchanged until then. Entries past a row's last
        block are never read (S-9). ``plan`` builds a block table from a request map.
    num_tokens : int
        T, the tokens of the step's tensors, padded tokens included.
    max_query_len : int or None
        The largest query length of a row, >= 1, if it is known on the host. It determines the
        kernel variant. A longer row also gets correct outputs, but more slowly. With ``None``, a
        step with no more tokens than rows counts as a decode step, and any other step as one of the
        longest queries of the capacities. With ``batch_invariant`` all steps must pass the same
        value, since the bits of a row are equal only in steps of the same kernel variant (S-20).
    mask : bool [..] or uint8 [T, W], or None
        The draft trees, in the config's spelling (S-14). Elements of a flat mask past those of the
        rows are never read.
    query_lens : sequence of int [B] or None
        The query lengths that `cu_seqlens_q` has, if known on the host. Then `max_query_len`
        must be ``None``: the longest query comes from them, except with ``batch_invariant``.
    max_seq_lens : sequence of int [B] or None
        Upper bounds of `seq_lens` on the host, if known; they require `query_lens`.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | RequestMap
    _: KW_ONLY
    num_tokens: int
    max_query_len: int | None = None
    mask: torch.Tensor | None = None
    query_lens: Sequence[int] | None = None
    max_seq_lens: Sequence[int] | None = None

    @classmethod
    def from_host(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Sequence[Sequence[int]] | torch.Tensor | RequestMap,
        *,
        device: str | torch.device = "cuda",
        num_tokens: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> MlaStep:
        """Return a step of lengths on the host, which are copied without waiting for the device.

        Parameters
        ----------
        query_lens : sequence of int [B]
            Tokens of each row in this step, >= 0.
        seq_lens : sequence of int [B]
            Tokens of each row, including those of this step; 0 for a padded row.
        block_table : sequence of sequences of int, int32 [B, M], or RequestMap
            The blocks of each row; rows may have different numbers of blocks. A tensor or a map is
            used without a copy.
        device : str or torch.device
            The device of the instance that plans the step.
        num_tokens : int or None
            T; ``None`` uses the sum of `query_lens`, which means no padding.
        mask : bool [..] or uint8 [T, W], or None
            The draft trees, on the device.

        Raises
        ------
        InvalidArgument
            A length is not an integer from 0 to 2^31 - 1, the query lengths exceed 2^31 - 1 in all,
            a list does not have one element for each row, a block is not an int32 integer, or
            `num_tokens` or `device` has a wrong type.
        Unsupported
            The device is not available.
        """
        queries = lengths_of("query_lens", query_lens, None)
        num_rows = len(queries)
        keys = lengths_of("seq_lens", seq_lens, num_rows)
        ends, sum_of_queries = queries.cumsum(), int(queries.sum())
        if sum_of_queries >= 2**31:
            raise InvalidArgument("query_lens", f"{sum_of_queries} in all", "at most 2 ** 31 - 1")
        is_given = isinstance(block_table, (torch.Tensor, RequestMap))
        table = _table_of("block_table", [[]] * num_rows if is_given else block_table, num_rows)
        # One copy to the device: lengths and blocks are packed, each at a multiple of 16 bytes.
        parts = [np.concatenate([[0], ends]), keys, table.ravel()]
        starts = np.cumsum([0, *(-(-part.size // 4) * 4 for part in parts)])  # multiples of 4
        packed = np.zeros(starts[-1], np.int32)
        for start, part in zip(starts[:-1], parts, strict=True):
            packed[start : start + part.size] = part
        copied = _on_device(packed, device_of(device))
        first, second, third, _ = starts.tolist()
        on_device: torch.Tensor | RequestMap
        if isinstance(block_table, (torch.Tensor, RequestMap)):
            on_device = block_table
        else:
            on_device = copied[third : third + table.size].view(table.shape)
        return cls(
            copied[first : num_rows + 1],
            copied[second : second + num_rows],
            on_device,
            num_tokens=sum_of_queries if num_tokens is None else integer("num_tokens", num_tokens),
            mask=mask,
            query_lens=queries.tolist(),
            max_seq_lens=keys.tolist(),
        )

    @property
    def num_rows(self) -> int:
        """B, padded rows included."""
        return self.seq_lens.shape[0]

    def most_keys(self, block_size: int) -> int:
        """Return the largest number of keys that a row of the table or request map can have."""
        if isinstance(self.block_table, RequestMap):
            return self.block_table.req_to_token.shape[1]
        return self.block_table.shape[1] * block_size

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The lengths, the mask and the request map, by name, without a block table."""
        lengths = {"cu_seqlens_q": self.cu_seqlens_q, "seq_lens": self.seq_lens, "mask": self.mask}
        if isinstance(self.block_table, RequestMap):
            given = self.block_table
            return lengths | {"req_to_token": given.req_to_token, "request_ids": given.request_ids}
        return lengths


def lengths_of(name: str, given: Any, num_rows: int | None) -> NDArray[np.int64]:
    """Return the lengths of rows, int64 [B], from a sequence on the host.

    Raises
    ------
    InvalidArgument
        The lengths are not integers from 0 to 2^31 - 1, or not one for each row.
    """
    array = _array_of(name, given)
    if array.ndim != 1 or num_rows not in {None, len(array)}:
        allowed = (
            "one length for each row"
            if num_rows is None
            else f"one length for each of {num_rows} rows"
        )
        raise InvalidArgument(name, f"shape {array.shape}", allowed)
    if array.size and not _has_integers(array):
        raise InvalidArgument(name, f"elements of {array.dtype}", "integers")
    wrong = array[(array < 0) | (array >= 2**31)]  # the sum of larger values could exceed int64
    if wrong.size:
        raise InvalidArgument(name, wrong[0], "0 to 2 ** 31 - 1")
    return array.astype(np.int64)


def _array_of(name: str, given: Any, place: str = "") -> NDArray[Any]:
    """Return an array of data on the host; in an error message, `place` follows its type."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # data on a device, or of unequal lengths
        kind = f"a {type(given).__name__}{place}"
        raise InvalidArgument(name, kind, "a sequence of integers on the host") from None


def _has_integers(array: NDArray[Any]) -> bool:
    """Return whether all elements are integers, including Python integers of any size."""
    if array.dtype.kind == "O":
        return all(isinstance(value, int) for value in array.flat)
    return array.dtype.kind in "iu"


def _table_of(name: str, given: Any, num_rows: int) -> NDArray[np.int32]:
    """Return the block table of rows on the host, int32 [B, M], as wide as the longest row."""
    has_lines = isinstance(given, Sequence) or (isinstance(given, np.ndarray) and given.ndim > 0)
    if not has_lines or len(given) != num_rows:
        kind = f"{len(given)} lines" if has_lines else f"a {type(given).__name__}"
        raise InvalidArgument(name, kind, f"a sequence of blocks for each of {num_rows} rows")
    lines = []
    for row, line in enumerate(given):
        place = f" in row {row}"
        blocks = _array_of(name, line, place)
        if blocks.ndim != 1 or (blocks.size and not _has_integers(blocks)):
            raise InvalidArgument(name, f"{line!r}{place}", "a sequence of integers")
        wrong = blocks[(blocks < -(2**31)) | (blocks >= 2**31)]
        if wrong.size:
            raise InvalidArgument(name, f"{wrong[0]}{place}", "int32")
        lines.append(blocks)
    table = np.full((num_rows, max(map(len, lines), default=0)), _NO_BLOCK, np.int32)
    for row, line in enumerate(lines):
        table[row, : len(line)] = line
    return table


def _on_device(array: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return a copy on the device, without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
