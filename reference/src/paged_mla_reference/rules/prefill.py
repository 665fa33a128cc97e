"""Rule S-21: attention over the keys and values of every head, which long prompts use.

A key of head h is ``[k_nope[h] || k_pe]``, and a value is ``v[h]``.
:mod:`paged_mla_reference.rules.absorb` computes them from latents and explains why the output is
equal to the output of absorbed attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer, nothing_visible, weighted_mean
from paged_mla_reference.rules.paging import query_spans
from paged_mla_reference.rules.rounding import Rounding, widen
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Problem


def prefill(
    problem: Problem,
    batch: PrefillBatch,
    rounding: Rounding = Rounding.SPEC,
    visible: Sequence[NDArray[np.bool_]] | None = None,
) -> Answer:
    """Attend every query to the keys of its row that it sees (S-4 to S-7, S-21).

    ``s_j = softmax_scale * (q_nope[h] . k_nope_j[h] + q_pe[h] . k_pe_j)``;
    ``lse = ln sum_j exp(s_j)``; ``out = sum_j exp(s_j - lse) * v_j[h]``.

    A query that sees no key, and a padded query, have ``out`` 0 and ``lse`` -inf (S-6). A key that
    a query does not see has no effect on its output, even if the key is NaN (S-4, S-9).

    Parameters
    ----------
    problem : Problem
        The function reads its dims, dtype and softmax scale.
    batch : PrefillBatch
        Valid (:func:`paged_mla_reference.rules.validation.inputs.validate_prefill`).
    rounding : Rounding
        Where results are rounded: nowhere, or at the specification's rounding points. These are
        scores (float32), the weights that multiply the values (the problem's dtype; the denominator
        sums float32 weights), ``out`` (the problem's dtype) and ``lse`` (float32).
    visible : sequence of bool [queries, keys], optional
        One matrix per row, which marks the keys that each query sees. By default,
        ``batch.causal`` determines them.

    Returns
    -------
    output : Answer
        ``out`` is [T, H, V]; ``value_bound`` is the largest ``|v|`` over the visible keys;
        ``turn_error`` is 0.
    """
    dims = problem.dims
    answer = nothing_visible(batch.num_tokens, dims.num_heads, dims.v_head_dim)
    spans = list(zip(query_spans(batch), key_spans(batch), strict=True))
    if visible is None:
        visible = [sees(q.stop - q.start, k.stop - k.start, causal=batch.causal) for q, k in spans]
    for (queries, keys), pairs in zip(spans, visible, strict=True):
        some = pairs.any(axis=1)  # [q]
        if not some.any():
            continue
        seen, tokens = pairs[some], queries.start + np.flatnonzero(some)
        for head in range(dims.num_heads):
            q = np.hstack([widen(batch.q_nope[tokens, head]), widen(batch.q_pe[tokens, head])])
            k = np.hstack([widen(batch.k_nope[keys, head]), widen(batch.k_pe[keys])])
            v = widen(batch.v[keys, head])
            scores = np.where(seen, problem.softmax_scale * (q @ k.T), -np.inf)  # [q, K]
            out, lse = _mean_of_seen(scores, v, seen, problem.dtype, rounding)
            answer.out[tokens, head], answer.lse[tokens, head] = out, lse
            magnitudes = problem.softmax_scale * (np.abs(q) @ np.abs(k).T)  # [q, K]
            answer.score_bound[tokens, head] = np.where(seen, magnitudes, 0.0).max(axis=1)
            largest = np.abs(v).max(axis=1)  # [K]
            answer.value_bound[tokens, head] = np.where(seen, largest, 0.0).max(axis=1)
    return answer


def _mean_of_seen(
    scores: NDArray[np.float64],
    v: NDArray[np.float64],
    seen: NDArray[np.bool_],
    dtype: str,
    rounding: Rounding,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return :func:`weighted_mean`; a value that a query does not see does not change its mean."""
    if np.isfinite(v).all():
        return weighted_mean(scores, v, dtype, rounding)
    # A weight of 0 times NaN is NaN, so each query gets only the values that it sees.
    each = [
        weighted_mean(own[None, pairs], v[pairs], dtype, rounding)
        for own, pairs in zip(scores, seen, strict=True)
    ]
    return np.concatenate([out for out, _ in each]), np.concatenate([lse for _, lse in each])


def sees(queries: int, keys: int, *, causal: bool) -> NDArray[np.bool_]:
    """Return the mask of the keys that each query of a row sees, bool [queries, keys] (S-4)."""
    if not causal:
        return np.ones((queries, keys), bool)
    return np.tri(queries, keys, keys - queries, dtype=bool)


def key_spans(batch: PrefillBatch) -> list[slice]:
    """Return the keys of each row as a slice of the key axis."""
    return [slice(start, stop) for start, stop in pairwise(batch.cu_seqlens_k.tolist())]
