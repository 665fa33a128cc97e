"""Known faults of attention that hold only in rows of one query token, or only in the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import errors_of
from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis, catalogued
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import query_spans
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

_ROWS = {"one query token": False, "several query tokens": True}


def faults_in_some_rows(found: Examination) -> Iterator[Hypothesis]:
    """Return the known faults, each in the rows of one query token or in the rows of several.

    Many kernels have a path of their own for rows of one token. There are no hypotheses if rows of
    both kinds have errors, or if a step has only rows of one kind.
    """
    batch, right = found.step.batch, found.right
    if batch is None or right is None:
        return
    wrong = np.asarray(errors_of(found.step, right).wrong.any(axis=1))  # [T]
    for rows, several in _ROWS.items():
        others = _of_rows(batch, several=not several)
        if not others.any() or wrong[others].any() or not wrong.any():
            continue
        for fault in catalogued(Stage.ATTENTION):
            yield replace(
                fault,
                name=f"{fault.name} in rows of {rows}",
                what=f"In rows of {rows}: {fault.what}",
                change=_only(fault.change, several=several),
                known=False,
            )


def _of_rows(batch: Batch, *, several: bool) -> NDArray[np.bool_]:
    """Return which tokens belong to a row of several query tokens, or to a row of one, [T]."""
    chosen = np.zeros(batch.num_tokens, bool)
    for span in query_spans(batch):
        chosen[span] = (span.stop - span.start > 1) == several
    return chosen


def _only(change: Callable[[Oracle], Oracle], *, several: bool) -> Callable[[Oracle], Oracle]:
    """Return a change that has the fault only in some rows; the others have right outputs."""

    def changed(oracle: Oracle) -> Oracle:
        faulty = change(oracle)

        def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
            right = oracle.attend(problem, batch, image)
            wrong = faulty.attend(problem, batch, image)
            here = _of_rows(batch, several=several)
            return Output(
                np.where(here[:, None, None], wrong.out, right.out),
                np.where(here[:, None], wrong.lse, right.lse),
            )

        return replace(oracle, attend=attend)

    return changed
