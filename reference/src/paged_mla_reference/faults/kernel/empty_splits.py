"""Splits without keys, which a shorter row has beside a longer one, merged as if they had some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import answering, per_token
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.problem import Batch, Output, Problem

Lengths = NDArray[np.int64]  # [B], of rows, in keys
TILE = 64  # keys of a split


def past_the_end(split: int, lengths: Lengths) -> Lengths:
    """Return how many splits of so many keys the longest row has, and each row has not."""
    splits = -(-lengths // split)
    return np.asarray(splits.max(initial=0) - splits)


def of_a_number(count: int, lengths: Lengths) -> Lengths:
    """Return how many of `count` splits, as long as each other, hold no key of a row."""
    each = np.maximum(-(-lengths // count), 1)
    return np.asarray(count - -(-lengths // each))


def with_an_lse_of_0(oracle: Oracle, empty: Callable[[Lengths], Lengths]) -> Oracle:
    """Merge splits whose lse is 0, where it should be -inf, and whose output is 0.

    Parameters
    ----------
    oracle : Oracle
    empty : callable
        Takes the rows' lengths; returns how many such splits each row has.
    """

    def change(_: Problem, batch: Batch, answer: Output) -> Output:
        counts = per_token(batch, empty(batch.seq_lens.astype(np.int64)))
        tokens = np.flatnonzero(counts)
        lse = answer.lse[tokens]
        with np.errstate(invalid="ignore"):  # an lse of +inf
            merged = np.logaddexp(lse, np.log(counts[tokens])[:, None])
            answer.out[tokens] *= np.exp(lse - merged)[..., None]
        answer.lse[tokens] = merged
        return answer

    return answering(oracle, change)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-6", "S-7", "S-20", akin="vllm#47188")
def splits_past_a_row_have_an_lse_of_0(oracle: Oracle) -> Oracle:
    """Every row has as many splits of 64 keys as the longest; those past its end have lse 0."""
    return with_an_lse_of_0(oracle, partial(past_the_end, TILE))
