"""Rule S-8: merging partial results over disjoint keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.rules.validation.inputs import validate_partials
from paged_mla_shared.problem import Output


def merge(partials: Sequence[Output]) -> Output:
    """Merge partial results of the same queries over disjoint sets of keys (S-8).

    ``lse = ln sum_i exp(lse_i)``; ``out = sum_i exp(lse_i - lse) * out_i``.

    A partial result with ``lse`` -inf is empty: it has weight exactly 0 for any content of its
    ``out``, NaN included. The merged result of a query with only empty partial results is
    ``(0, -inf)``. The order of the partial results does not change the result beyond rounding.

    Parameters
    ----------
    partials : sequence of Output
        At least one; ``out`` float32 [T, H, R], ``lse`` float32 [T, H] in nats, finite or -inf.
        Strides are arbitrary, but the last stride of ``out`` is 1.

    Returns
    -------
    Output
        float32, computed in float64.

    Raises
    ------
    InvalidArgument
        `partials` is empty, shapes or dtypes are wrong, or an ``lse`` is NaN or +inf.
    """
    validate_partials(partials)
    return merge_unchecked(partials)


def merge_unchecked(partials: Sequence[Output]) -> Output:
    """Merge as :func:`merge` does, without checks.

    NaN in an ``lse``, or in the ``out`` of a partial result that is not empty, gives NaN.
    """
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
