"""Rule S-8: merging partial answers over disjoint keys into one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.rules.validation.inputs import validate_partials
from paged_mla_shared.problem import Output


def merge(partials: Sequence[Output]) -> Output:
    """Merge partial answers of the same queries over disjoint sets of keys (S-8).

    ``lse = ln sum_i exp(lse_i)``; ``out = sum_i exp(lse_i - lse) * out_i``.

    The merge is total: a partial with ``lse`` -inf has weight exactly 0 whatever its ``out``
    holds, NaN included, and a query with no other partial gets ``(0, -inf)``. The order of the
    partials does not matter beyond rounding.

    Parameters
    ----------
    partials : sequence of Output
        At least one; ``out`` float32 [T, H, R], ``lse`` float32 [T, H] in nats, finite or -inf.
        Any strides, but for the last of ``out``, which is 1.

    Returns
    -------
    Output
        float32, computed in float64.

    Raises
    ------
    InvalidArgument
        Shapes or dtypes differ, or an ``lse`` is NaN or +inf.
    """
    validate_partials(partials)
    return merge_unchecked(partials)


def merge_unchecked(partials: Sequence[Output]) -> Output:
    """Merge as :func:`merge` does; what is NaN in a part is NaN in the whole, and no error."""
    lses = np.stack([widen(partial.lse) for partial in partials])  # [n, T, H]
    outs = np.stack([widen(partial.out) for partial in partials])  # [n, T, H, R]
    empty = np.isneginf(lses)  # [n, T, H]
    nothing = empty.all(axis=0)  # [T, H]

    highest = np.where(nothing, 0.0, lses.max(axis=0))  # [T, H]
    weights = np.exp(lses - highest)  # [n, T, H]
    total = weights.sum(axis=0)  # [T, H]
    contributions = np.where(empty[..., None], 0.0, outs) * weights[..., None]

    divisor = np.where(nothing, 1.0, total)  # [T, H]
    out = contributions.sum(axis=0) / divisor[..., None]  # [T, H, R]
    lse = np.where(nothing, -np.inf, highest + np.log(divisor))  # [T, H]
    return Output(out=round_to(out, "float32"), lse=round_to(lse, "float32"))
