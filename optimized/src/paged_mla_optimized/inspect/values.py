"""Checks of values: what the kernels trust, looked at on the host (rules S-1, S-2, S-14)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_optimized.config import MlaConfig
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import GROUPS_PER_BLOCK


def check_values(
    config: MlaConfig,
    *,
    cu_seqlens_q: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    num_blocks: int,
    num_tokens: int,
    mask: NDArray[Any] | None,
    slot_mapping: NDArray[np.int64] | None,
) -> None:
    """Raise ``InvalidArgument`` if a step breaks a rule; shapes and dtypes are right already."""
    query_lens = _check_lengths(config, cu_seqlens_q, seq_lens, num_tokens)
    _check_table(config, seq_lens, block_table, num_blocks)
    if mask is not None:
        _check_mask(config, query_lens, seq_lens, mask)
    if slot_mapping is None:
        _check_planned_slots(config, query_lens, seq_lens, block_table)
    else:
        _check_slots(config, slot_mapping, num_blocks * config.block_size)


def table_of_map(
    config: MlaConfig,
    req_to_token: NDArray[np.int32],
    request_ids: NDArray[np.integer[Any]],
    seq_lens: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return the block table that a request map means, -1 past a row's tokens.

    Raises ``InvalidArgument`` if a row's request is not there, or its slots are not blocks'.
    """
    size = config.block_size
    longest = max(int(seq_lens.max(initial=0)), 0)
    if longest > req_to_token.shape[1]:
        given = f"{req_to_token.shape[1]} tokens a request"
        raise InvalidArgument("req_to_token", given, f"at least {longest}")
    table = np.full((len(seq_lens), -(-longest // size)), -1, np.int32)
    for row, (request, seq_len) in enumerate(zip(request_ids, seq_lens, strict=True)):
        if seq_len <= 0:
            continue
        if not 0 <= request < len(req_to_token):
            given, allowed = f"{request} in row {row}", f"0 to {len(req_to_token) - 1}"
            raise InvalidArgument("request_ids", given, allowed)
        slots = req_to_token[request, :seq_len].astype(np.int64)
        firsts = slots[::size]
        if (np.repeat(firsts, size)[:seq_len] + np.arange(seq_len) % size != slots).any():
            given = f"slots of row {row} that leave a block before its end"
            raise InvalidArgument("req_to_token", given, "those of each block in order")
        if (firsts % size).any():
            given = f"slots of row {row} that begin inside a block"
            raise InvalidArgument("req_to_token", given, f"multiples of block_size = {size}")
        table[row, : len(firsts)] = firsts // size
    return table


def check_prefix_sums(
    name: str, sums: NDArray[np.int32], limit: str, most: int
) -> NDArray[np.int64]:
    """Return the lengths whose prefix sums are `sums`, of which the last is `most` at most."""
    lengths = np.subtract(sums[1:], sums[:-1], dtype=np.int64)
    if sums[0] != 0:
        raise InvalidArgument(name, f"first entry {sums[0]}", "0")
    if (lengths < 0).any():
        at = int((lengths < 0).argmax())
        given = f"{sums[at]} and then {sums[at + 1]} at entry {at + 1}"
        raise InvalidArgument(name, given, "prefix sums, which never fall")
    if sums[-1] > most:
        raise InvalidArgument(name, f"last entry {sums[-1]}", f"at most {limit} = {most}")
    return lengths


def _check_lengths(
    config: MlaConfig, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], num_tokens: int
) -> NDArray[np.int64]:
    """Return query_lens [B]."""
    query_lens = check_prefix_sums("cu_seqlens_q", cu_seqlens_q, "T", num_tokens)
    outside = (seq_lens < 0) | (seq_lens > config.max_model_len)
    if outside.any():
        row = int(outside.argmax())
        given = f"{seq_lens[row]} in row {row}"
        raise InvalidArgument("seq_lens", given, f"0 to max_model_len = {config.max_model_len}")
    short = (seq_lens > 0) & (seq_lens < query_lens)
    if config.mask != "non_causal" and short.any():
        row = int(short.argmax())
        given = f"{seq_lens[row]} in row {row}, whose query_len is {query_lens[row]}"
        allowed = "0, or at least query_len unless the mask is non_causal"
        raise InvalidArgument("seq_lens", given, allowed)
    wide = query_lens > config.max_draft_tokens
    if config.is_tree and wide.any():
        row = int(wide.argmax())
        given = f"{query_lens[row]} drafts in row {row}"
        allowed = f"at most max_draft_tokens = {config.max_draft_tokens}"
        raise InvalidArgument("cu_seqlens_q", given, allowed)
    return query_lens


def _check_table(
    config: MlaConfig,
    seq_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    num_blocks: int,
) -> None:
    blocks = -(-seq_lens.astype(np.int64) // config.block_size)
    width = block_table.shape[1]
    narrow = blocks > width
    if narrow.any():
        row = int(narrow.argmax())
        allowed = f"at least {blocks[row]}, for the {seq_lens[row]} tokens of row {row}"
        raise InvalidArgument("block_table", f"{width} columns", allowed)
    outside = (np.arange(width) < blocks[:, None]) & (
        (block_table < 0) | (block_table >= num_blocks)
    )
    if outside.any():
        row, column = np.argwhere(outside)[0].tolist()
        given = f"block {block_table[row, column]} in row {row}, column {column}"
        raise InvalidArgument("block_table", given, f"0 to {num_blocks - 1}")


def _check_planned_slots(
    config: MlaConfig,
    query_lens: NDArray[np.int64],
    seq_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
) -> None:
    written: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        keys = np.arange(max(seq_len - query_len, 0), seq_len)
        block = block_table[row, keys // config.block_size].astype(np.int64)
        written.append(block * config.block_size + keys % config.block_size)
    if twice := _twice(_stored(config, np.concatenate(written))):
        raise InvalidArgument("block_table", f"two tokens for slot {twice[0]}", "a slot each")
    if config.scales == "per_group":
        size = config.block_size // GROUPS_PER_BLOCK
        groups = [np.unique(_stored(config, slots) // size) for slots in written]
        if twice := _twice(np.concatenate(groups)):
            given = f"two rows for the group of slot {twice[0] * size}"
            allowed = "groups of a row each, or slot_mapping, which may come in any order"
            raise InvalidArgument("block_table", given, allowed)


def _stored(config: MlaConfig, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots that something is stored at: not negative, nor reserved."""
    reserved = -1 if config.reserved_slot is None else config.reserved_slot
    stored: NDArray[np.int64] = slots[(slots >= 0) & (slots != reserved)]
    return stored


def _twice(numbers: NDArray[np.int64]) -> list[int]:
    """Return those that come more than once."""
    found, counts = np.unique(numbers, return_counts=True)
    return [int(number) for number in found[counts > 1]]


def mask_elements(config: MlaConfig, query_lens: NDArray[np.int64], seq_lens: NDArray[Any]) -> int:
    """Return how many elements the rows have in a flat mask, whose buffer may hold more."""
    return int((query_lens * _mask_widths(config, query_lens, seq_lens)).sum())


def _mask_widths(
    config: MlaConfig, query_lens: NDArray[Any], seq_lens: NDArray[Any]
) -> NDArray[Any]:
    """Return the elements of a draft's line in a flat mask, for each row."""
    return seq_lens if config.mask == "tree:full" else query_lens


def _check_mask(
    config: MlaConfig,
    query_lens: NDArray[np.int64],
    seq_lens: NDArray[np.int32],
    mask: NDArray[Any],
) -> None:
    widths = _mask_widths(config, query_lens, seq_lens)
    if config.mask != "tree:packed":
        elements = mask_elements(config, query_lens, seq_lens)
        if len(mask) < elements:
            raise InvalidArgument("mask", f"{len(mask)} elements", f"at least {elements}")
    token, element = 0, 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        count = int(query_len)
        if config.mask == "tree:packed":
            lines = np.unpackbits(mask[token : token + count], axis=1, bitorder="little")
        else:
            width = int(widths[row])
            lines = mask[element : element + count * width].reshape(count, width)
            element += count * width
        token += count
        if seq_len > 0:
            _check_tree(config, row, lines, int(seq_len) - count)


def _check_tree(config: MlaConfig, row: int, lines: NDArray[Any], context_len: int) -> None:
    """Check one row's lines [query_len, ..]: context columns first if the spelling has them."""
    count = len(lines)
    if config.mask == "tree:full":
        if not lines[:, :context_len].all():
            raise InvalidArgument("mask", f"row {row} hides its context", "all true")
        lines = lines[:, context_len:]
    tree = lines[:, :count].astype(bool)
    if not np.diagonal(tree).all():
        raise InvalidArgument("mask", f"a node of row {row} misses itself", "true")
    if np.triu(tree, 1).any():
        raise InvalidArgument("mask", f"a node of row {row} sees a later one", "false")


def _check_slots(config: MlaConfig, slot_mapping: NDArray[np.int64], num_slots: int) -> None:
    outside = (slot_mapping < -1) | (slot_mapping >= num_slots)
    if outside.any():
        token = int(outside.argmax())
        given = f"slot {slot_mapping[token]} of token {token}"
        raise InvalidArgument("slot_mapping", given, f"-1 to {num_slots - 1}")
    if twice := _twice(_stored(config, slot_mapping)):
        raise InvalidArgument("slot_mapping", f"two tokens for slot {twice[0]}", "a slot each")
