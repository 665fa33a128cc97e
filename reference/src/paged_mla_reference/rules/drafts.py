"""Rules S-15 and S-16: the part of the cache that a draft model reads for each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.cache import copy_slots
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layout import CacheImage


@dataclass(frozen=True)
class DraftView:
    """Metadata of one draft step: each branch is a row with one query token (S-15).

    Parameters
    ----------
    seq_lens : int32 [B * k]
        Row ``b * k + j`` is branch j of request b.
    cu_seqlens_q : int32 [B * k + 1]
    block_table : int32 [B * k, M]
    """

    seq_lens: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]
    block_table: NDArray[np.int32]


def draft_view(
    prefix_lens: NDArray[np.int32],
    prefix_table: NDArray[np.int32],
    branch_blocks: NDArray[np.int32],
    step: int,
    block_size: int,
) -> DraftView:
    """Return the rows of draft step i: each branch reads its request's prefix and its own drafts.

    A branch reads ``prefix_len + i + 1`` tokens: the prefix of its request, and the i + 1 tokens
    that it has drafted, including the current token. It reads no token of another branch (S-15).
    Branches share the full blocks of the prefix. They cannot share a last, partly filled block,
    because its free slots would then belong to every branch. Each branch continues in its own
    block, which :func:`copy_tails` fills once before step 0.

    Parameters
    ----------
    prefix_lens : int32 [B]
        Tokens of each prefix.
    prefix_table : int32 [B, M']
        Blocks of the prefixes.
    branch_blocks : int32 [B, k, W]
        Blocks that only branch j of request b uses.
    step : int
        i, 0-based.
    block_size : int
        Tokens per block.

    Returns
    -------
    DraftView
    """
    requests, branches, own = branch_blocks.shape
    table = np.full((requests, branches, prefix_table.shape[1] + own), -1, np.int32)
    for b, shared in enumerate((prefix_lens // block_size).tolist()):
        table[b, :, :shared] = prefix_table[b, :shared]
        table[b, :, shared : shared + own] = branch_blocks[b]
    rows = requests * branches
    return DraftView(
        seq_lens=np.repeat(prefix_lens, branches).astype(np.int32) + np.int32(step + 1),
        cu_seqlens_q=np.arange(rows + 1, dtype=np.int32),
        block_table=table.reshape(rows, -1),
    )


def copy_tails(
    image: CacheImage,
    prefix_lens: NDArray[np.int32],
    prefix_table: NDArray[np.int32],
    branch_blocks: NDArray[np.int32],
) -> CacheImage:
    """Return a cache in which each branch has its own copy of the prefix's partly filled block.

    The arguments are those of :func:`draft_view`.
    """
    block_size = image.layout.block_size
    for b, prefix_len in enumerate(prefix_lens.tolist()):
        shared, filled = divmod(prefix_len, block_size)
        if filled:
            index = np.arange(filled)
            source = int(prefix_table[b, shared]) * block_size + index
            for first in branch_blocks[b, :, 0].tolist():
                image = copy_slots(image, source, first * block_size + index)
    return image


def extend_window(
    committed: NDArray[np.int32], window: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return ``seq_lens`` [B] and ``cu_seqlens_q`` [B + 1] of a draft-extend step (S-16).

    Every request runs `window` tokens that start at its committed length. The shapes do not depend
    on the number of tokens that are accepted later. The engine discards the outputs past the
    accepted tokens.
    """
    rows = np.arange(len(committed) + 1, dtype=np.int32)
    return committed + np.int32(window), rows * np.int32(window)


def commit(
    committed: NDArray[np.int32], accepted: NDArray[np.int32], window: int
) -> NDArray[np.int32]:
    """Return the committed lengths before the next step, int32 [B] (S-16).

    The tokens that the window wrote past the accepted tokens stay in the cache and are never
    visible. The next window overwrites the first of them, and no ``seq_len`` reaches past the
    tokens that were written again.

    Raises
    ------
    InvalidArgument
        A request accepted fewer than 0 or more than `window` tokens.
    """
    if ((accepted < 0) | (accepted > window)).any():
        raise InvalidArgument("accepted", accepted.tolist(), f"0 to {window} tokens")
    return committed + accepted
