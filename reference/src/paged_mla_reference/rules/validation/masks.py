"""Checks of tree masks (S-14): their shapes, their types, and the keys that they hide or show."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.masks import decode_mask
from paged_mla_shared.dtypes import dtype_name
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Problem


def validate_mask(problem: Problem, batch: Batch) -> None:
    """Raise ``InvalidArgument`` unless the problem allows the batch's mask.

    In a legal tree mask, every live node sees itself, no node sees a later node, and the context
    columns of the FULL spelling are true. The function does not check lines of padded rows and
    tokens (S-9).
    """
    if problem.mask is not Mask.TREE:
        if batch.mask is not None:
            raise InvalidArgument(
                "mask", "a mask", f"no mask if the problem's mask is {problem.mask}"
            )
        return
    if batch.mask is None:
        raise InvalidArgument("mask", "none", f"a mask in the spelling {problem.mask_spelling}")
    longest = int(batch.query_lens.max(initial=0))
    if longest > problem.max_draft_tokens:
        allowed = f"rows of at most {problem.max_draft_tokens} query tokens"
        raise InvalidArgument("max_draft_tokens", f"a row of {longest} query tokens", allowed)
    if problem.mask_spelling is MaskSpelling.PACKED:
        _validate_packed(problem, batch, batch.mask)
    else:
        _validate_flat(problem, batch, batch.mask)
    for matrix, seq_len in zip(decode_mask(problem, batch), batch.seq_lens, strict=True):
        if seq_len and not matrix.diagonal().all():
            raise InvalidArgument(
                "mask", "a node that does not see itself", "nodes that all see themselves"
            )
        if seq_len and np.triu(matrix, 1).any():
            raise InvalidArgument(
                "mask", "a node that sees a later node", "nodes that see only earlier nodes"
            )


def _validate_packed(problem: Problem, batch: Batch, mask: NDArray[Any]) -> None:
    if mask.dtype != np.uint8:
        raise InvalidArgument("mask", f"dtype {dtype_name(mask.dtype)}", "uint8 for a packed mask")
    if mask.ndim != 2 or len(mask) != batch.num_tokens:
        raise InvalidArgument("mask", f"shape {mask.shape}", f"shape [{batch.num_tokens}, W]")
    if 8 * mask.shape[1] < problem.max_draft_tokens:
        allowed = f"8 W >= max_draft_tokens = {problem.max_draft_tokens}"
        raise InvalidArgument("mask", f"W = {mask.shape[1]}", allowed)


def _validate_flat(problem: Problem, batch: Batch, mask: NDArray[Any]) -> None:
    if mask.dtype != np.bool_:
        raise InvalidArgument("mask", f"dtype {dtype_name(mask.dtype)}", "bool")
    query_lens, seq_lens = batch.query_lens.astype(np.int64), batch.seq_lens.astype(np.int64)
    full = problem.mask_spelling is MaskSpelling.FULL
    sizes = query_lens * (seq_lens if full else query_lens)  # [B]
    if mask.shape != (sizes.sum(),):
        raise InvalidArgument("mask", f"shape {mask.shape}", f"shape ({sizes.sum()},)")
    if not full:
        return
    for row, end in enumerate(np.cumsum(sizes).tolist()):
        lines = mask[end - sizes[row] : end]
        if sizes[row] and not _context_is_true(lines, int(query_lens[row]), int(seq_lens[row])):
            raise InvalidArgument(
                "mask", f"a false context column in row {row}", "true context columns"
            )


def _context_is_true(lines: NDArray[Any], query_len: int, seq_len: int) -> bool:
    return bool(lines.reshape(query_len, seq_len)[:, : seq_len - query_len].all())
