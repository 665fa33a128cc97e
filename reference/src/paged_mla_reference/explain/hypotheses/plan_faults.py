"""Find positions and slots that are wrong by a constant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.problem import Batch, Metadata, Problem


def faults_of_plan(found: Examination) -> Iterator[Hypothesis]:
    """Return the constant by which wrong positions, or wrong slots, differ from the right ones."""
    step = found.step
    if step.batch is None:
        return
    right = metadata(step.problem, step.batch)
    for name, field in step.planned.items():
        off = step.array(field) - getattr(right, name)
        by = np.unique(off[off != 0])
        if len(by) == 1:
            tokens = np.flatnonzero(off)
            what = f"{field} of {len(tokens)} tokens are off by {by[0]:+}"

            def change(oracle: Oracle, name: str = name, off: np.ndarray = off) -> Oracle:
                def moved(problem: Problem, batch: Batch) -> Metadata:
                    own = oracle.metadata(problem, batch)
                    return replace(own, **{name: getattr(own, name) + off})

                return replace(oracle, metadata=moved)

            yield Hypothesis(what, f"{what}.", change, ("S-1", "S-3"))
