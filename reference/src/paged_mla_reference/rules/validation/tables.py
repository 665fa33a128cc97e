"""Block tables and slots the rules forbid: wrong memory, or memory of another row."""

from __future__ import annotations

import numpy as np

from paged_mla_reference.rules.paging import blocks_of, used_blocks
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Batch, Problem


def validate_table(problem: Problem, batch: Batch) -> None:
    """Raise ``InvalidArgument`` unless each row has a block of its own for all its tokens.

    The table is wide enough, its blocks exist (S-1), and no row has one of them twice: two
    positions would be one slot. Entries past a row's last block are not looked at (S-9).
    """
    width = batch.block_table.shape[1]
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        if blocks_of(seq_len, problem.block_size) > width:
            allowed = f">= {blocks_of(seq_len, problem.block_size)}, for {seq_len} tokens"
            raise InvalidArgument("block_table", f"{width} columns in row {row}", allowed)
        used = used_blocks(batch, row, problem.block_size)
        if ((used < 0) | (used >= problem.num_blocks)).any():
            raise InvalidArgument(
                "block_table", f"a block of row {row} outside", f"[0, {problem.num_blocks})"
            )
        blocks, counts = np.unique(used, return_counts=True)
        if (counts > 1).any():
            given = f"block {blocks[counts > 1][0]} twice in row {row}"
            raise InvalidArgument("block_table", given, "each block once")


def validate_slots(problem: Problem, batch: Batch) -> None:
    """Raise ``InvalidArgument`` unless each slot that is written is one token's, and not shared.

    A block that several rows read is full, and nobody writes to it (S-13). A row without queries
    reads nothing. Where slots are named, rows may be queries of one request, as on a rank of a
    divided cache (S-18): they have the same blocks up to the one that is written.
    """
    slots, argument = batch.slot_mapping, "slot_mapping"
    if slots is None:
        slots, argument = metadata(problem, batch).slot_mapping, "block_table"
    limit = problem.num_blocks * problem.block_size
    if ((slots < -1) | (slots >= limit)).any():
        raise InvalidArgument(argument, "slots outside", f"-1, or [0, {limit})")
    written = slots[slots >= 0]
    if len(np.unique(written)) < len(written):
        raise InvalidArgument(argument, "one slot for two tokens", "distinct slots")
    holders = _rows_of_blocks(problem, batch)
    for block in np.unique(written // problem.block_size).tolist():
        if block not in holders:
            continue
        first, *others = holders[block]
        for row in others:
            if batch.slot_mapping is None or not _same_request(problem, batch, block, first, row):
                given = f"block {block} in rows {first} and {row}, and this step writes to it"
                raise InvalidArgument(argument, given, "blocks of one row, where a step writes")


def _rows_of_blocks(problem: Problem, batch: Batch) -> dict[int, list[int]]:
    """Return the rows with queries that have each block."""
    rows: dict[int, list[int]] = {}
    for row in np.flatnonzero(batch.query_lens).tolist():
        for block in used_blocks(batch, row, problem.block_size).tolist():
            rows.setdefault(block, []).append(row)
    return rows


def _same_request(problem: Problem, batch: Batch, block: int, *rows: int) -> bool:
    """Return whether two rows have the same blocks up to one that both have."""
    first, second = [
        used.tolist()[: used.tolist().index(block)]
        for used in (used_blocks(batch, row, problem.block_size) for row in rows)
    ]
    return bool(first == second)
