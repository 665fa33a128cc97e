"""Count the ordinary steps that a hypothesis would have broken.

Of two hypotheses that explain a dump equally well, the narrower is more likely. With the broader
one, many steps would fail, and a failing step picked at random would seldom be one that the
narrower hypothesis breaks too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import TypeVar

import numpy as np

from paged_mla_reference.explain.checks.dump_checks import examine
from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.explain.hypotheses.residual import Measure, can_be_tried, measure_of
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.materialize import materialize
from paged_mla_shared.cases import GROUPS, MERGES, PREFILLS, Case, MergeCase, PrefillCase
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dump import Dump
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.inputs import Step as GivenStep
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.prefill_inputs import build_prefills

T = TypeVar("T")
_DTYPE = "float32"
_OF_A_GROUP = 6
_MOST_PAIRS = 4000  # of a query token and a key


def breadth(hypothesis: Hypothesis) -> int:
    """Return how many ordinary steps a hypothesis would have broken."""
    return sum(any(_breaks(hypothesis, measure) for measure in step) for step in _measures())


def dump_of(step: GivenStep, oracle: Oracle) -> Dump:
    """Return a dump of a step's inputs and of the oracle's results."""
    problem = step.problem
    batch, before = materialize(step)
    after = oracle.append(problem, batch, before)
    found = oracle.metadata(problem, batch)
    answer = oracle.attend(problem, batch, after)
    arrays = {name: x for name, x in vars(batch).items() if x is not None}
    arrays |= {"positions": found.positions, "slots": found.slot_mapping}
    arrays |= {"out": answer.out, "lse": answer.lse}
    arrays["block_ids"] = after.block_ids
    for when, image in (("before", before), ("after", after)):
        arrays[f"bytes_{when}"] = image.read(after.block_ids)
    return Dump(problem=problem, arrays=arrays)


def _breaks(hypothesis: Hypothesis, measure: Measure) -> bool:
    try:
        with np.errstate(all="ignore"):
            return measure(hypothesis.change).wrong > 0
    except Exception:  # a fault may not be applicable to the sizes or dtypes of a step
        return False


@cache
def _measures() -> list[list[Measure]]:
    """Return, for each ordinary step, the measures of its stages."""
    found = [examine(Step.of(dump)) for dump in _dumps()]
    return [[measure_of(f, stage) for stage in Stage if can_be_tried(f, stage)] for f in found]


def _dumps() -> Iterator[Dump]:
    """Yield dumps of right steps: small cases of every group, prefills and merges."""
    formats = cycle(name for name, stored in FORMATS.items() if not stored.is_plain)
    for group, cases in GROUPS.items():
        for case in _some([case for case in cases if _pairs(case) <= _MOST_PAIRS]):
            stored = next(formats) if group == "formats" else None
            [step, *_] = build_steps(replace(case, cache_format=stored), SMALL, _DTYPE)
            yield dump_of(step, RIGHT)
    for prefill in _some([case for case in PREFILLS if _pairs(case) <= _MOST_PAIRS]):
        yield _prefilled(prefill)
    yield from map(_merged, MERGES)


def _some(cases: Sequence[T]) -> Sequence[T]:
    """Return at least ``_OF_A_GROUP`` evenly spaced cases; all of them if there are fewer."""
    return cases[:: max(len(cases) // _OF_A_GROUP, 1)]


def _pairs(case: Case | PrefillCase) -> int:
    return sum(row.query_len * row.seq_len for row in case.steps[0])


def _prefilled(case: PrefillCase) -> Dump:
    problem = case.problem(SMALL, _DTYPE)
    [batch, *_] = build_prefills(case, SMALL, _DTYPE)
    answer = RIGHT.prefill(problem, batch)
    given = {name: np.asarray(array) for name, array in vars(batch).items()}
    given |= {"out": answer.out, "lse": answer.lse}
    return Dump(problem=problem, arrays={f"prefill_{name}": x for name, x in given.items()})


def _merged(case: MergeCase) -> Dump:
    problem = GROUPS["decode"][0].problem(SMALL.with_heads(case.num_heads), _DTYPE)
    parts = case.build(SMALL.kv_lora_rank)
    merged = RIGHT.merge(parts)
    arrays = {
        "partial_out": np.stack([part.out for part in parts]),
        "partial_lse": np.stack([part.lse for part in parts]),
        "out": merged.out,
        "lse": merged.lse,
    }
    return Dump(problem=replace(problem, dims=SMALL.with_heads(case.num_heads)), arrays=arrays)
