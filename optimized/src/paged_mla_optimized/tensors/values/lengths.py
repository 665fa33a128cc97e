"""Check lengths and masks on the host (rules S-2 and S-14)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_shared.errors import InvalidArgument


def check_prefix_sums(
    name: str, sums: NDArray[np.int32], limit: str, most: int | None
) -> NDArray[np.int64]:
    """Return the lengths whose prefix sums are `sums`; the last sum must be at most `most`.

    With ``None`` the last sum has no limit. `limit` is the name of `most` in error messages.
    Raise ``InvalidArgument`` if the first sum is not 0, a sum decreases, or the last is above
    `most`.
    """
    lengths = np.subtract(sums[1:], sums[:-1], dtype=np.int64)
    if sums[0] != 0:
        raise InvalidArgument(name, f"first entry {sums[0]}", "0")
    if (lengths < 0).any():
        at = int((lengths < 0).argmax())
        given = f"{sums[at]} and then {sums[at + 1]} at entry {at + 1}"
        raise InvalidArgument(name, given, "prefix sums, which must not decrease")
    if most is not None and sums[-1] > most:
        raise InvalidArgument(name, f"last entry {sums[-1]}", f"at most {limit} = {most}")
    return lengths


def check_lengths(
    config: MlaConfig, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], num_tokens: int
) -> NDArray[np.int64]:
    """Return query_lens [B].

    Raises
    ------
    InvalidArgument
        A length breaks a rule or exceeds a limit of `config`, or the rows have more than
        `num_tokens` tokens.
    """
    query_lens = check_prefix_sums("cu_seqlens_q", cu_seqlens_q, "num_tokens", num_tokens)
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


def mask_elements(config: MlaConfig, query_lens: NDArray[np.int64], seq_lens: NDArray[Any]) -> int:
    """Return the number of elements that the rows use in a flat mask."""
    return int((query_lens * _mask_widths(config, query_lens, seq_lens)).sum())


def _mask_widths(
    config: MlaConfig, query_lens: NDArray[Any], seq_lens: NDArray[Any]
) -> NDArray[Any]:
    """Return the mask elements of one draft token in a flat mask, for each row."""
    return seq_lens if config.mask == "tree:full" else query_lens


def check_mask(
    config: MlaConfig,
    query_lens: NDArray[np.int64],
    seq_lens: NDArray[np.int32],
    mask: NDArray[Any],
) -> None:
    """Check a tree mask: flat elements, or lines of packed bytes for "tree:packed".

    The lengths must have passed :func:`check_lengths`. The trees of rows without keys are not
    checked.

    Raises
    ------
    InvalidArgument
        The mask is too small for its rows, hides a context key, hides a node from itself, or shows
        a later node.
    """
    widths = _mask_widths(config, query_lens, seq_lens)
    if config.mask != "tree:packed":
        elements = mask_elements(config, query_lens, seq_lens)
        if len(mask) < elements:
            columns = "seq_len" if config.mask == "tree:full" else "query_len"
            allowed = f"at least {elements}, the sum of query_len * {columns} of all rows"
            raise InvalidArgument("mask", f"{len(mask)} elements", allowed)
    elif len(mask) < query_lens.sum():
        allowed = f"one line for each token of the step, at least {query_lens.sum()}"
        raise InvalidArgument("mask", f"{len(mask)} lines", allowed)
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
    """Check the mask lines of one row, [query_len, ..]; "tree:full" has context columns first."""
    count = len(lines)
    if config.mask == "tree:full":
        if not lines[:, :context_len].all():
            given = f"a false context column in row {row}"
            raise InvalidArgument("mask", given, "true in all context columns")
        lines = lines[:, context_len:]
    tree = lines[:, :count].astype(bool)
    if not np.diagonal(tree).all():
        node = int(np.diagonal(tree).argmin())
        given = f"node {node} of row {row}, which does not see itself"
        raise InvalidArgument("mask", given, "true in column i of line i of each row's tree")
    if np.triu(tree, 1).any():
        given = f"a node of row {row} that sees a later node"
        raise InvalidArgument("mask", given, "false for later nodes")
