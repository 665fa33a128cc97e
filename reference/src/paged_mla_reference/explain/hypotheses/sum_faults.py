"""Find wrong sums of a query's weights: splits without keys, and sums rounded to 16 bits.

The catalog has faults with one length of splits and of tiles; kernels have other lengths. The
search returns the lengths that match the lse of a wrong query.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.query_view import QueryView, views_of_wrong
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.faults.kernel.denominators import (
    TILE,
    lse_of_rounded_sums,
    summing_in,
)
from paged_mla_reference.faults.kernel.empty_splits import TILE as SPLIT
from paged_mla_reference.faults.kernel.empty_splits import (
    of_a_number,
    past_the_end,
    with_an_lse_of_0,
)
from paged_mla_reference.rules.rounding import widen

_LENGTHS = (1, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)  # keys of a split
_NUMBERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of splits of a row
_TILES = (16, 32, 128, 256, 512, 1024)  # keys between two roundings; the catalog has 64
ONCE = 1 << 62  # keys of a tile that is longer than every row
_NEAR = 1e-4  # largest difference of lse; the rounding of sums changes lse by more


def faults_of_sums(found: Examination) -> Iterator[Hypothesis]:
    """Return the empty splits, and the roundings of sums, that match the lse of a wrong query."""
    lse = found.step.lse
    if lse is None or found.step.batch is None:
        return
    lengths = found.step.batch.seq_lens.astype(np.int64)
    for view in views_of_wrong(found, 1):
        actual = widen(lse[view.token])
        if np.isfinite(actual).all() and np.isfinite(view.scores[:, view.seen]).all():
            yield from _empty_splits(view, actual, lengths)
            yield from _sums(view, actual, int(lengths.max()))


def _empty_splits(
    view: QueryView, lse: NDArray[np.float64], lengths: NDArray[np.int64]
) -> Iterator[Hypothesis]:
    """Return kinds of empty splits whose number in the row explains the excess of its sum.

    An empty split with an lse of 0 adds 1 to the sum of weights.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        ones = float(np.median(np.exp(lse) - np.exp(view.lse)))
    past = {f"past a row's end, of {n} keys,": partial(past_the_end, n) for n in _LENGTHS}
    beside = {f"without keys, of {n} in each row,": partial(of_a_number, n) for n in _NUMBERS}
    told = {past_the_end(SPLIT, lengths).tobytes()}  # the catalog has this fault
    for which, empty in (past | beside).items():
        counts = empty(lengths)
        expected = int(counts[view.row])
        if expected and abs(ones - expected) < 0.5 and counts.tobytes() not in told:
            told.add(counts.tobytes())
            name = f"splits {which} have an lse of 0"
            change = partial(with_an_lse_of_0, empty=empty)
            yield Hypothesis(name, f"{name}.", change, ("S-5", "S-6", "S-7"))


def _sums(view: QueryView, lse: NDArray[np.float64], longest: int) -> Iterator[Hypothesis]:
    """Return the roundings of a sum that predict the lse of this query.

    All tiles that are longer than the longest row predict the same, so one of them is tried.
    """
    scores = view.scores[:, view.seen]
    tiles = [tile for tile in _TILES if tile < longest] + [ONCE] * (longest > TILE)
    for dtype in ("bfloat16", "float16"):
        for tile in tiles:
            predicted = lse_of_rounded_sums(scores, dtype, tile)
            if np.abs(predicted - lse).max() > _NEAR:
                continue
            often = "once" if tile == ONCE else f"after every {tile} keys"
            name = f"the sum of weights is rounded to {dtype} {often}"
            change = partial(summing_in, dtype=dtype, tile=tile)
            yield Hypothesis(name, f"{name}.", change, ("S-5", "S-7"))
