"""Check illegal steps on a backend that declares ``bounded``.

Legal rows must have the outputs that they have if illegal rows are padding. No other byte of the
cache may change, and the next step of the runner must be right.
:mod:`paged_mla_reference.rules.bounded` defines how an illegal step is interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.rules import bounded
from paged_mla_reference.rules.cache import append, gather_context
from paged_mla_reference.rules.paging import blocks_of
from paged_mla_reference.tolerance import caches, compare
from paged_mla_shared.backend import OPERATIONS, BoundedBackend, Runner
from paged_mla_shared.cases import IllegalCase
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Batch, MaskSpelling, Metadata, Output, Problem


def check_bounded(trial: Trial) -> None:
    """Run the illegal step of the trial's case, then the legal one, on one unchecked runner."""
    assert isinstance(trial.case, IllegalCase)
    problem = trial.problem
    [step] = build_steps(trial.case, trial.dims, trial.dtype)
    good = Stage.of(step)
    runner = cast("BoundedBackend", trial.backend).prepare_unchecked(problem)
    given = spoilt(trial.case, problem, _other_tokens(good.batch))
    # The cache holds other tokens before the step, so that a missing write is found.
    runner.load_cache(good.after)
    taken = bounded.taken_as(problem, given)
    stage = Stage(problem, taken, good.after, append(problem, taken, good.after))
    expected = bounded.planned_as(problem, given)
    trial.checks += compare.check_metadata(taken, _in_cache(problem, runner.plan(given)), expected)
    runner.append(given)
    stage = replace(stage, after=trial.compare_cache(runner, stage, is_written=True))
    _check_answers(trial, runner.attend(given), stage, given)
    if "gather_context" in trial.backend.capabilities.ops:
        _check_gathered(trial, runner, stage, given)
    trial.compare_cache(runner, stage, is_written=False)
    runner.load_cache(good.before)
    trial.attend(runner, trial.append(runner, good))


def _in_cache(problem: Problem, planned: Metadata) -> Metadata:
    """Return the plan with -1 in place of slots past the end of the cache.

    A plan does not use the size of the cache, so it may compute slots of blocks past its end. An
    append must not write there; the comparison of the cache checks that.
    """
    slots = planned.slot_mapping
    end = problem.num_blocks * problem.block_size
    return Metadata(planned.positions, np.where(slots < end, slots, np.int64(-1)))


def spoilt(case: IllegalCase, problem: Problem, batch: Batch) -> Batch:
    """Return the legal step with the changes of the case."""
    starts, lengths = batch.cu_seqlens_q.copy(), batch.seq_lens.copy()
    for entry, value in case.starts:
        starts[entry] = value
    for row, value in case.lengths:
        lengths[row] = value
    table = batch.block_table[:, : case.columns].copy()
    for row, which, block in case.blocks:
        used = blocks_of(int(batch.seq_lens[row]), problem.block_size)
        table[row, which % used] = problem.num_blocks if block is None else block
    slots = batch.slot_mapping
    if slots is not None:
        slots = slots.copy()
        for token, slot in case.slots:
            slots[token] = problem.num_blocks * problem.block_size if slot is None else slot
    mask = batch.mask
    if mask is not None and problem.mask_spelling is MaskSpelling.FULL:
        mask = _with_columns(mask, batch, lengths)
    if mask is not None and case.elements is not None:
        mask = mask[: case.elements].copy()
    return replace(
        batch,
        cu_seqlens_q=starts,
        seq_lens=lengths,
        block_table=table,
        slot_mapping=slots,
        mask=mask,
    )


def _with_columns(mask: NDArray[Any], batch: Batch, lengths: NDArray[np.int32]) -> NDArray[Any]:
    """Return a mask in the form FULL whose rows have as many columns as `lengths` states."""
    query_lens = batch.query_lens.astype(np.int64)
    rows = np.split(mask, np.cumsum(query_lens * batch.seq_lens)[:-1])
    for row in np.flatnonzero(lengths != batch.seq_lens).tolist():
        rows[row] = np.ones(query_lens[row] * max(int(lengths[row]), 0), bool)
    return np.concatenate(rows)


def _other_tokens(batch: Batch) -> Batch:
    """Return the step with doubled latents and keys."""
    return replace(batch, ckv=batch.ckv + batch.ckv, k_pe=batch.k_pe + batch.k_pe)


def _check_answers(trial: Trial, actual: Output, stage: Stage, given: Batch) -> None:
    """Compare the outputs of the tokens for which the rules define an output."""
    known = bounded.has_meaning(stage.problem, given)
    exact, rounded, allowance = trial.answers(stage, known)
    compare.same_form("out", actual.out, exact.out.shape, stage.problem.dtype)
    compare.same_form("lse", actual.lse, exact.lse.shape, "float32")
    anything = np.ones((), actual.out.dtype), np.zeros((), np.float32)
    judged = Output(
        np.where(known[:, None, None], actual.out, anything[0]),
        np.where(known[:, None], actual.lse, anything[1]),
    )
    trial.checks += compare.check_output(
        stage.problem, stage.batch, judged, exact, rounded, allowance=allowance
    )


def _check_gathered(trial: Trial, runner: Runner, stage: Stage, given: Batch) -> None:
    """Compare the gathered keys of the rows that are legal with the contents of the cache."""
    actual = runner.gather_context(given)
    expected = gather_context(stage.problem, stage.batch, stage.after)
    strange = bounded.strange_rows(stage.problem, given)
    of_taken = np.append(np.zeros(stage.batch.num_rows - len(strange), bool), strange)
    known = ~np.repeat(of_taken, stage.batch.seq_lens)
    for what, mine, right in zip(("ckv", "k_pe"), actual, expected, strict=True):
        compare.same_form(what, mine, right.shape, stage.problem.dtype)
    judged = [x[known] for x in actual], [x[known] for x in expected]
    trial.checks += caches.check_read(OPERATIONS["gather_context"], *map(tuple, judged))
