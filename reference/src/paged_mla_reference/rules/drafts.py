"""Rules S-15 and S-16: how draft models see the cache of the requests they draft for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.cache import copy_slots
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layout import CacheImage


@dataclass(frozen=True)
class DraftView:
    """Batch metadata of one draft step: one row of one query token for each branch (S-15).

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
    """Return what each branch reads at draft step i: its request's prefix and its own drafts.

    A branch reads ``prefix_len + i + 1`` tokens: the prefix of its request and the i + 1
    tokens it has drafted, the current one included, and no token of a sibling (S-15). Full
    blocks of the prefix are shared. A last, partly filled one cannot be: its free slots would
    belong to every branch. Each branch continues in a block of its own, which
    :func:`copy_tails` fills once before step 0.

    Parameters
    ----------
    prefix_lens : int32 [B]
        Tokens.
    prefix_table : int32 [B, M']
        Blocks of the prefixes.
    branch_blocks : int32 [B, k, W]
        Blocks only branch j of request b uses.
    step : int
        i, 0-based.
    block_size : int
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
    """Return the cache after each branch got its copy of its prefix's partly filled block."""
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

    Every request runs `window` tokens from its committed length on, whatever will turn out to
    be accepted: shapes are fixed. Outputs past the accepted tokens are discarded.
    """
    rows = np.arange(len(committed) + 1, dtype=np.int32)
    return committed + np.int32(window), rows * np.int32(window)


def commit(
    committed: NDArray[np.int32], accepted: NDArray[np.int32], window: int
) -> NDArray[np.int32]:
    """Return the lengths the next step starts from, int32 [B] (S-16).

    What the window wrote past the accepted tokens stays in the cache and is never visible: the
    next window begins on top of it, and no length reaches beyond what was written again.

    Raises
    ------
    InvalidArgument
        A request accepted fewer than 0 or more than `window` tokens.
    """
    if ((accepted < 0) | (accepted > window)).any():
        raise InvalidArgument("accepted", accepted.tolist(), f"0 to {window} tokens")
    return committed + accepted
