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
from paged_mla_reference.faults.kernel.change import of_rows
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem


def faults_in_some_rows(found: Examination) -> Iterator[Hypothesis]:
    """Return the known faults, each in the rows of one query token or in the rows of several.

    Many kernels have a path of their own for rows of one token. There are no hypotheses if rows of
    both kinds have errors, or if a step has only rows of one kind.
    """
    batch, right = found.step.batch, found.right
    if batch is None or right is None:
        return
    wrong = np.asarray(errors_of(found.step, right).wrong.any(axis=1))  # [T]
    single = of_rows(batch, batch.query_lens == 1)
    several = of_rows(batch, batch.query_lens > 1)
    kinds = (("one query token", single, several), ("several query tokens", several, single))
    for rows, tokens, others in kinds:
        if not others.any() or wrong[others].any() or not wrong.any():
            continue
        for fault in catalogued(Stage.ATTENTION):
            yield replace(
                fault,
                name=f"{fault.name} in rows of {rows}",
                what=f"In rows of {rows}: {fault.what}",
                change=_only(fault.change, tokens),
                known=False,
            )


def _only(
    change: Callable[[Oracle], Oracle], tokens: NDArray[np.bool_]
) -> Callable[[Oracle], Oracle]:
    """Return a change that has the fault only in some tokens; the others have right outputs."""

    def changed(oracle: Oracle) -> Oracle:
        faulty = change(oracle)

        def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
            right = oracle.attend(problem, batch, image)
            wrong = faulty.attend(problem, batch, image)
            return Output(
                np.where(tokens[:, None, None], wrong.out, right.out),
                np.where(tokens[:, None], wrong.lse, right.lse),
            )

        return replace(oracle, attend=attend)

    return changed
