"""Rules S-5, S-6 and S-7: scores, softmax, output and lse of every query.

Queries are absorbed: their scores are products with the cached latent, which is both the key and
the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.cache import read_keys
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import query_spans, slots_of
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import Rounding, round_to, ulp, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

QueryAnswer = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], float]
AttendQuery = Callable[
    [Problem, NDArray[np.float64], NDArray[np.float64], Rounding], QueryAnswer
]  # takes and returns the same as attend_one


@dataclass(frozen=True)
class Answer:
    """The output of every query, and bounds from which error budgets are derived.

    Parameters
    ----------
    out : float64 [T, H, R]
    lse : float64 [T, H]
        In nats; -inf where the query sees no key (S-6, S-7).
    score_bound : float64 [T, H]
        Largest ``softmax_scale * sum_i |q_i * k_ji|`` over the visible keys j; the rounding error
        of a score is proportional to it. 0 where the query sees no key.
    value_bound : float64 [T, H]
        Largest ``|ckv|`` over the visible keys; 0 where the query sees no key.
    turn_error : float64 [T, H]
        Bound of the change of a score if one rotated element, of the query or of a visible key, is
        rounded to its other neighbor (S-12); 0 without a rope or a visible key.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    score_bound: NDArray[np.float64]
    value_bound: NDArray[np.float64]
    turn_error: NDArray[np.float64]

    def output(self, dtype: str) -> Output:
        """Return the output with ``out`` rounded to `dtype` and ``lse`` to float32."""
        return Output(out=round_to(self.out, dtype), lse=round_to(self.lse, "float32"))


def attend(
    problem: Problem,
    batch: Batch,
    image: CacheImage,
    rounding: Rounding = Rounding.SPEC,
    asked: NDArray[np.bool_] | None = None,
) -> Answer:
    """Attend every query to the cache (S-4 to S-7).

    ``s_j = softmax_scale * (q_nope . ckv_j + q_pe . k_pe_j)`` over visible keys j;
    ``lse = ln sum_j exp(s_j)``; ``out = sum_j exp(s_j - lse) * ckv_j``.

    A query that sees no key, and a padded token, have ``out`` 0 and ``lse`` -inf (S-6). The
    function reads only slots that at least one query of their row sees (S-9).

    Parameters
    ----------
    problem, batch : Problem, Batch
        Valid (:mod:`paged_mla_reference.rules.validation.inputs`). The function does not read
        ``ckv``, ``k_pe`` and ``slot_mapping`` of the batch: append the tokens first.
    image : CacheImage
    rounding : Rounding
        Where results are rounded: nowhere, or at the specification's rounding points. These
        are a rotated ``q_pe`` (to the problem's dtype), scores (float32), the weights that
        multiply the values (the problem's dtype; the denominator sums float32 weights), ``out``
        (the problem's dtype) and ``lse`` (float32).
    asked : bool [T], optional
        The query tokens to compute, all of them by default. ``out`` and ``lse`` of the other tokens
        are NaN, unless the token sees no key.

    Returns
    -------
    output : Answer
    """
    return attend_visible(problem, batch, image, visibility(problem, batch), rounding, asked=asked)


def attend_visible(
    problem: Problem,
    batch: Batch,
    image: CacheImage,
    visible: Sequence[NDArray[np.bool_]],
    rounding: Rounding = Rounding.SPEC,
    *,
    asked: NDArray[np.bool_] | None = None,
    attend_query: AttendQuery | None = None,
) -> Answer:
    """Attend as :func:`attend` does, to the keys in `visible`.

    Parameters
    ----------
    problem, batch : Problem, Batch
    image : CacheImage
    visible : sequence of bool [query_len, seq_len]
        One matrix per row. A rank of a context-parallel group passes its own keys (S-18).
    rounding : Rounding
    asked : bool [T], optional
        As in :func:`attend`.
    attend_query : AttendQuery, optional
        The function that computes one query token, :func:`attend_one` by default. Faults pass
        another function.

    Returns
    -------
    output : Answer
    """
    attend_query = attend_query or attend_one
    dims = problem.dims
    answer = nothing_visible(batch.num_tokens, dims.num_heads, dims.kv_lora_rank)
    asked = np.ones(batch.num_tokens, bool) if asked is None else asked
    positions = metadata(problem, batch).positions
    for row, span in enumerate(query_spans(batch)):
        sees_any = visible[row].any(axis=1)  # [q]
        unasked = span.start + np.flatnonzero(sees_any & ~asked[span])
        answer.out[unasked], answer.lse[unasked] = np.nan, np.nan
        seen = visible[row] & asked[span, None]  # [q, S]
        if not seen.any():
            continue
        queries = _queries(problem, batch.q_nope[span], batch.q_pe[span], positions[span], rounding)
        read = np.flatnonzero(seen.any(axis=0))  # [K]
        slots = slots_of(batch.block_table[row], read, problem.block_size)
        keys = read_keys(image, slots)  # [K, R+P]
        for i, t in enumerate(range(span.start, span.stop)):
            sees = seen[i, read]  # [K]
            if sees.any():
                own = keys if sees.all() else keys[sees]
                one = attend_query(problem, queries[i], own, rounding)
                answer.out[t], answer.lse[t], answer.score_bound[t], answer.value_bound[t] = one
                answer.turn_error[t] = turn_error(problem, queries[i], own)
    return answer


def attend_one(
    problem: Problem, query: NDArray[np.float64], keys: NDArray[np.float64], rounding: Rounding
) -> QueryAnswer:
    """Attend one query token to the keys that it sees (S-5, S-7).

    Parameters
    ----------
    problem : Problem
        The function reads its dims, dtype and softmax scale.
    query : float64 [H, R+P]
    keys : float64 [K, R+P]
        K >= 1.
    rounding : Rounding

    Returns
    -------
    out : float64 [H, R]
    lse : float64 [H]
    score_bound : float64 [H]
    value_bound : float
        The elements of an :class:`Answer` for this token.
    """
    values = keys[:, : problem.dims.kv_lora_rank]  # [K, R]
    scores = problem.softmax_scale * (query @ keys.T)  # [H, K]
    out, lse = weighted_mean(scores, values, problem.dtype, rounding)
    magnitudes = problem.softmax_scale * (np.abs(query) @ np.abs(keys).T)  # [H, K]
    return out, lse, magnitudes.max(axis=1), float(np.abs(values).max())


def turn_error(
    problem: Problem, query: NDArray[np.float64], keys: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the ``turn_error`` [H] of an :class:`Answer` for one query and the keys it sees."""
    if problem.rope is None:
        return np.zeros(len(query))
    rotated = np.s_[:, problem.dims.kv_lora_rank :]
    products = np.abs(query[rotated]) * np.abs(keys[rotated]).max(axis=0)  # [H, P]
    spacing = problem.softmax_scale * ulp(np.ones(()), problem.dtype)  # of numbers from 1 to 2
    return np.asarray(spacing * products.max(axis=1))


def weighted_mean(
    scores: NDArray[np.float64], values: NDArray[np.float64], dtype: str, rounding: Rounding
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean of the values, weighted by the scores' softmax, and the lse (S-5, S-7).

    Parameters
    ----------
    scores : float64 [n, K]
        Scaled; -inf where a query does not see the key. Every query sees at least one key.
    values : float64 [K, W]
    dtype : str
        The type to which ``Rounding.SPEC`` rounds the mean and the weights that multiply values.
    rounding : Rounding

    Returns
    -------
    out : float64 [n, W]
    lse : float64 [n]
    """

    def rounded(x: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
        return x if rounding is Rounding.EXACT else widen(round_to(x, dtype))

    scores = rounded(scores, "float32")
    highest = scores.max(axis=1, keepdims=True)  # [n, 1]
    weights = rounded(np.exp(scores - highest), "float32")  # [n, K]
    total = weights.sum(axis=1, keepdims=True)  # [n, 1]
    out = rounded(rounded(weights, dtype) @ values / total, dtype)  # [n, W]
    return out, rounded((highest + np.log(total))[:, 0], "float32")


def _queries(
    problem: Problem,
    q_nope: NDArray[Any],
    q_pe: NDArray[Any],
    positions: NDArray[np.int64],
    rounding: Rounding,
) -> NDArray[np.float64]:
    """Return ``[q_nope || q_pe]`` of a row's queries, [q, H, R+P]; a rope rotates ``q_pe``."""
    if problem.rope is not None:
        q_pe = rotate(widen(q_pe), positions, problem.rope)
        if rounding is Rounding.SPEC:
            q_pe = round_to(q_pe, problem.dtype)
    return np.concatenate([widen(q_nope), widen(q_pe)], axis=2)


def nothing_visible(num_tokens: int, num_heads: int, width: int) -> Answer:
    """Return the :class:`Answer` of queries that see no key, with ``out`` [T, H, `width`] (S-6)."""
    shape = (num_tokens, num_heads)
    return Answer(
        out=np.zeros((*shape, width)),
        lse=np.full(shape, -np.inf),
        score_bound=np.zeros(shape),
        value_bound=np.zeros(shape),
        turn_error=np.zeros(shape),
    )
