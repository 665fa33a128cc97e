"""Check block tables and slots on the host (rules S-1, S-10, S-13, S-18)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.step import RequestMap
from paged_mla_shared.errors import InvalidArgument


@dataclass(frozen=True)
class Paging:
    """The mapping from the tokens of a row to slots in the blocks of its table row.

    Parameters
    ----------
    block_size : int
        Tokens of a block on one rank.
    reserved_slot : int or None
        A slot, on each rank, in which nothing is stored.
    world, interleave : int
        Ranks that share the cache, and consecutive tokens on each rank (S-18).
    """

    block_size: int
    reserved_slot: int | None
    world: int = 1
    interleave: int = 1

    @classmethod
    def of(cls, config: MlaConfig, world: int = 1, interleave: int = 1) -> Paging:
        """Return the paging of a config."""
        return cls(config.block_size, config.reserved_slot, world, interleave)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the table, on all ranks together."""
        return self.block_size * self.world

    def places(self, blocks: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each token, ``slot * world + rank``."""
        offsets = positions % self.block_tokens
        rounds, inside = np.divmod(offsets, self.world * self.interleave)
        rank, inside = np.divmod(inside, self.interleave)
        slots = blocks * self.block_size + rounds * self.interleave + inside
        places: NDArray[np.int64] = slots * self.world + rank
        return places

    def stored(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places that store a token: those that are neither negative nor reserved."""
        kept = places >= 0
        if self.reserved_slot is not None:
            kept &= places // self.world != self.reserved_slot
        return places[kept]


class Table:
    """The block table of a step.

    A row without queries reads and writes nothing. A row is padding if all its blocks are the
    block of the reserved slot and it reaches that slot, since engines send padding there.

    Parameters
    ----------
    paging : Paging
    query_lens : int [B]
    seq_lens : int [B]
        >= 0.
    block_table : int [B, M]
    argument : str
        The name of the table in error messages.
    """

    def __init__(
        self,
        paging: Paging,
        query_lens: NDArray[np.integer[Any]],
        seq_lens: NDArray[np.integer[Any]],
        block_table: NDArray[np.int32],
        argument: str = "block_table",
    ) -> None:
        self._argument = argument
        self._paging, self._width = paging, block_table.shape[1]
        self._query_lens, self._seq_lens = query_lens, seq_lens.astype(np.int64)
        self._blocks = -(-self._seq_lens // paging.block_tokens)  # of each row
        self._table = block_table[:, : self._blocks.max(initial=0)].astype(np.int64)
        columns = np.arange(self._table.shape[1])
        self._is_used = columns < self._blocks[:, None]
        self._is_padding = self._find_padding()

    @property
    def used(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Blocks of rows that are not padding, with the row and the column of each, int64 [n]."""
        rows, columns = np.nonzero(self._is_used & ~self._is_padding[:, None])
        return self._table[rows, columns], rows, columns

    def check(self, num_blocks: int | None) -> None:
        """Raise ``InvalidArgument`` unless the blocks of each row exist and are distinct (S-1)."""
        narrow = self._blocks > self._width
        if narrow.any():
            row = int(narrow.argmax())
            allowed = f"at least {self._blocks[row]}, for the {self._seq_lens[row]} tokens of row "
            raise InvalidArgument(self._argument, f"{self._width} columns", f"{allowed}{row}")
        most = np.iinfo(np.int32).max if num_blocks is None else num_blocks - 1
        outside = self._is_used & ((self._table < 0) | (self._table > most))
        if outside.any():
            row, column = np.argwhere(outside)[0].tolist()
            given = f"block {self._table[row, column]} in row {row}, column {column}"
            allowed = "0 or more" if num_blocks is None else f"0 to {most}"
            raise InvalidArgument(self._argument, given, allowed)
        blocks, rows, _ = self.used
        order = np.lexsort((blocks, rows))
        blocks, rows = blocks[order], rows[order]
        twice = (blocks[1:] == blocks[:-1]) & (rows[1:] == rows[:-1])
        if twice.any():
            at = int(twice.argmax())
            given = f"block {blocks[at]} twice in row {rows[at]}"
            raise InvalidArgument(self._argument, given, "each block at most once in a row")

    def check_planned_slots(self) -> None:
        """Check that the slots of the plan are distinct, and in no block that two rows read."""
        counts = np.where(self._is_padding, 0, np.minimum(self._query_lens, self._seq_lens))
        rows = np.repeat(np.arange(len(counts)), counts)
        ends = counts.cumsum()
        behind = ends[rows] - np.arange(len(rows))  # tokens of the row from this token on
        positions = self._seq_lens[rows] - behind
        blocks = self._table[rows, positions // self._paging.block_tokens]
        places = self._paging.places(blocks, positions)
        self._check_written(self._argument, places, may_be_one_request=False)

    def check_slots(self, slot_mapping: NDArray[np.int64], num_blocks: int | None) -> None:
        """Check that the caller's slots exist, are distinct, and in no block of two rows (S-10).

        Two rows may be queries of one request here, as on a rank of a divided cache (S-18). They
        then have the same blocks, up to the block that is written.
        """
        most = np.iinfo(np.int64).max
        if num_blocks is not None:
            most = num_blocks * self._paging.block_size - 1
        outside = (slot_mapping < -1) | (slot_mapping > most)
        if outside.any():
            token = int(outside.argmax())
            given = f"slot {slot_mapping[token]} of token {token}"
            allowed = "-1 or more" if num_blocks is None else f"-1 to {most}"
            raise InvalidArgument("slot_mapping", given, allowed)
        self._check_written("slot_mapping", slot_mapping, may_be_one_request=True)

    def _check_written(
        self, argument: str, places: NDArray[np.int64], *, may_be_one_request: bool
    ) -> None:
        """Reject two tokens in one slot, and a write to a block that two rows read (S-13)."""
        paging = self._paging
        places = paging.stored(places)
        if twice := repeated(places):
            given = f"two tokens for slot {twice[0] // paging.world}"
            raise InvalidArgument(argument, given, "a separate slot for each token")
        blocks, rows, columns = self.used
        asks = self._query_lens[rows] > 0
        written = np.unique(places // (paging.block_size * paging.world))
        for block in np.intersect1d(written, repeated(blocks[asks])):
            at = np.flatnonzero(asks & (blocks == block))
            lines = [self._table[rows[n], : columns[n]].tolist() for n in at]
            for n, line in zip(at[1:], lines[1:], strict=True):
                if not may_be_one_request or line != lines[0]:
                    given = f"block {block} in rows {rows[at[0]]} and {rows[n]}"
                    allowed = "a block of one row, if the step writes to it"
                    raise InvalidArgument(argument, f"{given}, and this step writes to it", allowed)

    def _find_padding(self) -> NDArray[np.bool_]:
        paging = self._paging
        if paging.reserved_slot is None:
            return np.zeros(len(self._blocks), np.bool_)
        block, offset = divmod(paging.reserved_slot, paging.block_size)
        rounds, inside = divmod(offset, paging.interleave)
        first = rounds * paging.interleave * paging.world + inside  # position of the slot on rank 0
        is_elsewhere = self._is_used & (self._table != block)
        padding: NDArray[np.bool_] = (self._seq_lens > first) & ~is_elsewhere.any(axis=1)
        return padding


def table_of_map(
    config: MlaConfig, request_map: RequestMap, seq_lens: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the block table of a request map, with -1 after a row's blocks.

    Only the lines of the step's requests are copied from the device. A row in which every token
    has the reserved slot gets the block of that slot.

    Raises
    ------
    InvalidArgument
        A row's request does not exist, has fewer tokens in the map than the row, or its slots do
        not form blocks.
    """
    req_to_token, size = request_map.req_to_token, config.block_size
    request_ids = request_map.request_ids.cpu().numpy()
    longest = max(int(seq_lens.max(initial=0)), 0)
    if longest > req_to_token.shape[1]:
        given = f"{req_to_token.shape[1]} tokens per request"
        raise InvalidArgument("req_to_token", given, f"at least {longest}")
    live = seq_lens > 0
    outside = live & ((request_ids < 0) | (request_ids >= len(req_to_token)))
    if outside.any():
        at = int(outside.argmax())
        given, allowed = f"{request_ids[at]} in row {at}", f"0 to {len(req_to_token) - 1}"
        raise InvalidArgument("request_ids", given, allowed)
    rows = np.flatnonzero(live)
    wanted = torch.from_numpy(request_ids[rows]).to(req_to_token.device)
    lines = req_to_token[:, :longest].index_select(0, wanted).cpu().numpy()
    table = np.full((len(seq_lens), -(-longest // size)), -1, np.int32)
    for row, line in zip(rows.tolist(), lines, strict=True):
        seq_len = int(seq_lens[row])
        slots = line[:seq_len].astype(np.int64)
        firsts = slots[::size]
        if config.reserved_slot is not None and (slots == config.reserved_slot).all():
            table[row, : len(firsts)] = config.reserved_slot // size
            continue
        if (np.repeat(firsts, size)[:seq_len] + np.arange(seq_len) % size != slots).any():
            given = f"slots of row {row} that leave a block before its end"
            raise InvalidArgument("req_to_token", given, "consecutive slots inside each block")
        if (firsts % size).any():
            given = f"slots of row {row} that begin inside a block"
            raise InvalidArgument("req_to_token", given, f"multiples of block_size = {size}")
        table[row, : len(firsts)] = firsts // size
    return table


def repeated(numbers: NDArray[np.int64]) -> list[int]:
    """Return the numbers that occur more than once, in ascending order."""
    found, counts = np.unique(numbers, return_counts=True)
    return [int(number) for number in found[counts > 1]]
