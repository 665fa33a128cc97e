"""One batch as an engine describes it, and the block tables that engines keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.arguments import device_of, integer
from paged_mla_shared.errors import InvalidArgument

_NO_BLOCK = -1  # fills the lines of a table on the host up to the longest one


@dataclass(frozen=True, eq=False)
class RequestMap:
    """Where an engine keeps the slot of every token, in place of a block table.

    Parameters
    ----------
    req_to_token : int32 [requests, tokens]
        Slot of each token of each request; its last axis may have any stride. The slots of a block
        follow each other: only the first of each block is read.
    request_ids : int32 or int64 [B]
        Line of each row; never read where ``seq_lens`` is 0.

    Notes
    -----
    SGLang's ``req_to_token`` and ``req_pool_indices``. Rules S-1 and S-9.
    """

    req_to_token: torch.Tensor
    request_ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class MlaStep:
    """One batch: what ``plan``, ``check`` and ``explain`` take.

    The tensors are on the device of the instance that plans the step. Lengths on the device are
    read there only, so a step can be planned without waiting for them. :meth:`from_host` makes a
    step of lengths that the host knows.

    Parameters
    ----------
    cu_seqlens_q : int32 [B + 1]
        Prefix sums of query lengths; tokens at or past the last entry are padding (S-6).
    seq_lens : int32 [B]
        Tokens of each row, this step's included; 0 marks a padded row (S-2). With the mask
        "non_causal" a row may have fewer keys than queries: the queries in front of its first
        position have no slot.
    block_table : int32 [B, M], or RequestMap
        ``attend`` reads it again: keep it unchanged until then. Entries past a row's last block are
        never read (S-9). From a request map ``plan`` builds a block table.
    num_tokens : int
        T, the tokens of the step's tensors, padded ones included.
    max_query_len : int or None
        The longest query of any row, >= 1, as far as the host knows: it chooses the kernel. A
        longer row is right too, only slower. ``None`` takes a step with no more tokens than rows
        for decode, and others for the longest rows of the capacities. With ``batch_invariant`` it
        chooses one kernel for all steps, since a row has the same bits only in steps of one kernel
        (S-20).
    mask : bool [..] or uint8 [T, W], or None
        The draft trees, spelled as the config says (S-14). What a flat mask holds past the rows'
        own elements is never read.
    query_lens : sequence of int [B] or None
        What `cu_seqlens_q` holds, where the host knows it. It then tells the longest query, except
        with ``batch_invariant``, and `max_query_len` is ``None``.
    max_seq_lens : sequence of int [B] or None
        What `seq_lens` holds, or more, where the host knows it; given with `query_lens`.
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
        """Return a step of lengths on the host, which it copies to the device without waiting.

        Parameters
        ----------
        query_lens : sequence of int [B]
            Tokens of each row in this step, >= 0.
        seq_lens : sequence of int [B]
            Tokens of each row, this step's included; 0 for a padded row.
        block_table : sequence of sequences of int, int32 [B, M], or RequestMap
            The blocks of each row; lines may have different lengths. A tensor or a map is taken as
            it is.
        device : str or torch.device
            Of the instance that plans the step.
        num_tokens : int or None
            T; ``None`` takes the sum of `query_lens`: no padding.
        mask : bool [..] or uint8 [T, W], or None
            The draft trees, on the device.

        Raises
        ------
        InvalidArgument
            Lengths that are no integers from 0 to 2^31 - 1, not one for each row, or blocks that
            are no int32.
        Unsupported
            There is no such device.
        """
        queries = lengths_of("query_lens", query_lens, None)
        num_rows = len(queries)
        keys = lengths_of("seq_lens", seq_lens, num_rows)
        ends, sum_of_queries = queries.cumsum(), int(queries.sum())
        if sum_of_queries >= 2**31:
            raise InvalidArgument("query_lens", f"{sum_of_queries} in all", "at most 2 ** 31 - 1")
        is_given = isinstance(block_table, (torch.Tensor, RequestMap))
        table = _table_of("block_table", [[]] * num_rows if is_given else block_table, num_rows)
        # One copy: lengths and blocks lie behind each other, each part on 16 bytes.
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
        """Return how many keys of a row the block table or the request map has places for."""
        if isinstance(self.block_table, RequestMap):
            return self.block_table.req_to_token.shape[1]
        return self.block_table.shape[1] * block_size

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The lengths, the mask and the request map, by name; a block table is not among them."""
        lengths = {"cu_seqlens_q": self.cu_seqlens_q, "seq_lens": self.seq_lens, "mask": self.mask}
        if isinstance(self.block_table, RequestMap):
            given = self.block_table
            return lengths | {"req_to_token": given.req_to_token, "request_ids": given.request_ids}
        return lengths


def lengths_of(name: str, given: Any, num_rows: int | None) -> NDArray[np.int64]:
    """Return lengths of rows, int64 [B], of a sequence on the host.

    Raises
    ------
    InvalidArgument
        They are no integers from 0 to 2^31 - 1, or not one for each row.
    """
    array = _array_of(name, given)
    if array.ndim != 1 or num_rows not in {None, len(array)}:
        allowed = "one for each row" if num_rows is None else f"one for each of {num_rows} rows"
        raise InvalidArgument(name, f"shape {array.shape}", allowed)
    if array.size and not _has_integers(array):
        raise InvalidArgument(name, f"elements of {array.dtype}", "integers")
    wrong = array[(array < 0) | (array >= 2**31)]  # sums of larger ones could pass int64
    if wrong.size:
        raise InvalidArgument(name, wrong[0], "0 to 2 ** 31 - 1")
    return array.astype(np.int64)


def _array_of(name: str, given: Any, place: str = "") -> NDArray[Any]:
    """Return an array of what lies on the host, of any type; an error says at which place."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # on a device, or of several lengths
        kind = f"a {type(given).__name__}{place}"
        raise InvalidArgument(name, kind, "a sequence of integers on the host") from None


def _has_integers(array: NDArray[Any]) -> bool:
    """Return whether an array is one of integers, those that no type of NumPy holds included."""
    if array.dtype.kind == "O":
        return all(isinstance(value, int) for value in array.flat)
    return array.dtype.kind in "iu"


def _table_of(name: str, given: Any, num_rows: int) -> NDArray[np.int32]:
    """Return the block table of lines on the host, int32 [B, M], as wide as the longest line."""
    has_lines = isinstance(given, Sequence) or (isinstance(given, np.ndarray) and given.ndim > 0)
    if not has_lines or len(given) != num_rows:
        kind = f"{len(given)} lines" if has_lines else f"a {type(given).__name__}"
        raise InvalidArgument(name, kind, f"a line of blocks for each of {num_rows} rows")
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
    """Return a copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
