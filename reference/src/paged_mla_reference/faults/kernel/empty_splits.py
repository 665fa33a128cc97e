"""Faults of splits without keys, which short rows have in a step with longer rows."""

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
    """Return how many more splits of `split` keys the longest row has than each row, [B]."""
    splits = -(-lengths // split)
    return np.asarray(splits.max(initial=0) - splits)


def of_a_number(count: int, lengths: Lengths) -> Lengths:
    """Return how many of `count` equal splits of each row have no keys, [B]."""
    each = np.maximum(-(-lengths // count), 1)
    return np.asarray(count - -(-lengths // each))


def with_an_lse_of_0(oracle: Oracle, empty: Callable[[Lengths], Lengths]) -> Oracle:
    """Return an oracle that merges empty splits with lse 0, instead of -inf, and output 0.

    Parameters
    ----------
    oracle : Oracle
    empty : callable
        Takes the rows' lengths and returns the number of empty splits of each row.
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
    """Splits of 64 keys after the end of a row are merged with an lse of 0, instead of -inf."""
    return with_an_lse_of_0(oracle, partial(past_the_end, TILE))
