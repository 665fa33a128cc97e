"""The legal rows of a step, and attention in float64 for them.

This file follows the contract (``docs/contract.md``) and not the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paged_mla_optimized import MlaConfig


@dataclass
class Row:
    """One legal row of a step, without the tokens past the step's end.

    Attributes
    ----------
    number : int
    tokens : range
        The row's tokens in the step; empty if the row starts at or past the step's end.
    cut : int
        The number of tokens at or past the step's end.
    keys : int
        The number of tokens that are cached or in this step.
    blocks : list of int
        The ids of their blocks in the table.
    mask : slice
        Its elements of a flat mask, with `columns` elements a line.
    """

    number: int
    tokens: range
    cut: int
    keys: int
    blocks: list[int]
    columns: int = 0
    mask: slice = field(default_factory=lambda: slice(0))

    @property
    def query_len(self) -> int:
        """The number of tokens in the step."""
        return len(self.tokens)

    def key_of(self, index: int) -> int:
        """Return the position of a token in the row; negative before the first key."""
        return self.keys - self.query_len + index

    def slot_of(self, key: int, block_size: int) -> int | None:
        """Return the slot of a key, or ``None`` if its block is negative."""
        block = self.blocks[key // block_size]
        return None if block < 0 else block * block_size + key % block_size


def legal_rows(
    config: MlaConfig,
    starts: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int] | None],
    *,
    num_tokens: int,
    columns: int,
    mask_elements: int | None = None,
) -> list[Row]:
    """Return the rows that are not padding.

    Parameters
    ----------
    config, starts, seq_lens, num_tokens
        As for ``PagedMla.plan``.
    tables : for each row the ids of its blocks; ``None`` if the row has no line
    columns : int
        The number of tokens for which a line of the table or map has entries.
    mask_elements : int or None
        The number of elements of a flat mask; ``None`` for other masks.
    """
    rows: list[Row] = []
    reached, element = 0, 0
    for number, (begin, end, seq_len) in enumerate(
        zip(starts[:-1], starts[1:], seq_lens, strict=True)
    ):
        within = min(max(begin, 0), num_tokens)  # the order past the step's end is not checked
        first = reached = max(reached, within)
        tokens = range(first, max(first, min(end, num_tokens)))
        cut = end - begin - len(tokens)
        keys = max(seq_len - cut, 0)
        given = end - begin if end - begin < 2**31 else 0  # a length has 32 bits
        width = max(given if config.mask == "tree:qlen" else seq_len, 0)
        lines = slice(element, element + max(given, 0) * width)
        element = lines.stop
        is_legal = 0 <= begin <= end and within == reached
        is_legal &= keys > 0 and seq_len <= min(config.max_model_len, columns)
        is_legal &= config.mask == "non_causal" or end - begin <= seq_len
        is_legal &= not config.is_tree or end - begin <= config.max_draft_tokens
        is_legal &= mask_elements is None or lines.stop <= mask_elements
        table = tables[number]
        if is_legal and table is not None:
            blocks = [*table[: -(-keys // config.block_size)]]
            rows.append(Row(number, tokens, cut, keys, blocks, width, lines))
    return rows


def visible(config: MlaConfig, row: Row, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which keys each query of a row sees (S-4, S-14), bool [query_len, keys]."""
    count, context = row.query_len, row.keys - row.query_len
    if config.mask == "non_causal":
        return torch.ones(count, row.keys, dtype=torch.bool)
    if mask is None:
        return torch.ones(count, row.keys, dtype=torch.bool).tril(context)
    if config.mask == "tree:packed":
        lines = mask[row.tokens.start : row.tokens.stop].int()
        tree = (lines[:, :, None] >> torch.arange(8)) & 1
        tree = tree.flatten(1)[:, :count].bool()
    else:
        tree = mask[row.mask].reshape(count, row.columns)[:, row.columns - count :]
    return torch.cat([torch.ones(count, context, dtype=torch.bool), tree], dim=1)


def dense(
    config: MlaConfig, queries: torch.Tensor, keys: torch.Tensor, sees: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one row in float64: queries [q, H, R + P] to keys [k, R + P]."""
    every_head = keys[:, None].expand(-1, queries.shape[1], -1)
    values = every_head[..., : config.kv_lora_rank]
    out, lse = dense_heads(config.softmax_scale, queries, every_head, values, sees)
    return out, lse * config.lse_unit


def dense_heads(
    scale: float,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sees: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one row in float64: queries [q, H, D] to keys [k, H, D] and values [k, H, V]."""
    scores = scale * torch.einsum("qhd,khd->qhk", queries.double(), keys.double())
    scores = scores.masked_fill(~sees[:, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("qhk,khv->qhv", weights, values.double()), lse
