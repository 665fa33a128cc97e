"""Checks of block tables and slots: blocks outside the cache, and blocks of another row."""

from __future__ import annotations

import numpy as np

from paged_mla_reference.rules.paging import blocks_of, used_blocks
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Batch, Problem


def validate_table(problem: Problem, batch: Batch) -> None:
    """Raise ``InvalidArgument`` unless each row has enough distinct blocks for its tokens.

    In a legal table, each row has a column for each of its blocks, and these blocks exist (S-1). No
    row has a block twice, because two positions would then have the same slot. The function does
    not check entries past a row's last block (S-9).
    """
    width = batch.block_table.shape[1]
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        if blocks_of(seq_len, problem.block_size) > width:
            allowed = f">= {blocks_of(seq_len, problem.block_size)} columns for {seq_len} tokens"
            raise InvalidArgument("block_table", f"{width} columns in row {row}", allowed)
        used = used_blocks(batch, row, problem.block_size)
        if ((used < 0) | (used >= problem.num_blocks)).any():
            raise InvalidArgument(
                "block_table",
                f"a block outside the cache in row {row}",
                f"block ids in [0, {problem.num_blocks})",
            )
        blocks, counts = np.unique(used, return_counts=True)
        if (counts > 1).any():
            given = f"block {blocks[counts > 1][0]} twice in row {row}"
            raise InvalidArgument("block_table", given, "each block at most once in a row")


def validate_slots(problem: Problem, batch: Batch) -> None:
    """Raise ``InvalidArgument`` unless each written slot belongs to one token and to one row.

    A block that several rows read is full, and no step writes to it (S-13). A row without queries
    reads no block. If the batch has a slot mapping, several rows may be queries of one request, as
    on a rank of a divided cache (S-18). Their blocks are then equal up to the written block.
    """
    slots, argument = batch.slot_mapping, "slot_mapping"
    if slots is None:
        slots, argument = metadata(problem, batch).slot_mapping, "block_table"
    limit = problem.num_blocks * problem.block_size
    if ((slots < -1) | (slots >= limit)).any():
        raise InvalidArgument(argument, "slots outside the cache", f"-1, or slots in [0, {limit})")
    written = slots[slots >= 0]
    if len(np.unique(written)) < len(written):
        raise InvalidArgument(argument, "the same slot for two tokens", "distinct slots")
    holders = _rows_of_blocks(problem, batch)
    for block in np.unique(written // problem.block_size).tolist():
        if block not in holders:
            continue
        first, *others = holders[block]
        for row in others:
            if batch.slot_mapping is None or not _same_request(problem, batch, block, first, row):
                given = f"block {block} in rows {first} and {row}, and this step writes to it"
                raise InvalidArgument(argument, given, "written blocks that only one row has")


def _rows_of_blocks(problem: Problem, batch: Batch) -> dict[int, list[int]]:
    """Return, for each used block, the rows with queries that use it."""
    rows: dict[int, list[int]] = {}
    for row in np.flatnonzero(batch.query_lens).tolist():
        for block in used_blocks(batch, row, problem.block_size).tolist():
            rows.setdefault(block, []).append(row)
    return rows


def _same_request(problem: Problem, batch: Batch, block: int, *rows: int) -> bool:
    """Return whether two rows have the same blocks before `block`, which both rows have."""
    first, second = [
        used.tolist()[: used.tolist().index(block)]
        for used in (used_blocks(batch, row, problem.block_size) for row in rows)
    ]
    return bool(first == second)
