"""Measure, for each stage, the errors that remain if a hypothesis is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.answers import Sample
from paged_mla_reference.explain.checks.dump_checks import without_cache
from paged_mla_reference.explain.checks.errors import actual_output, differences
from paged_mla_reference.explain.checks.examination import Examination, are_numbers
from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.explain.checks.step import LATENTS, QUERIES, Step, is_valid, query_scale
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.rounding import ulp, widen
from paged_mla_reference.rules.validation.inputs import validate_partials
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.caches import Rotated, allowed_bytes, differs
from paged_mla_reference.tolerance.queries import wrong_queries
from paged_mla_shared.dtypes import bits
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Output
from paged_mla_shared.strides import copied

_LARGEST_SHARE = 1e9


@dataclass(frozen=True)
class Residual:
    """The errors that a hypothesis does not explain.

    Parameters
    ----------
    wrong : int
        The number of values in which its result differs from the dump. Depending on the stage,
        values are pairs of a query token and a head, bytes, slots, positions or tokens.
    of : int
        The number of values that were compared.
    rms : float
        The root mean square of the differences relative to their budgets; 0 without budgets.
    largest : float
        The largest difference of finite numbers.
    was, was_rms : int, float
        `wrong` and `rms` of the right result, without the hypothesis.
    """

    wrong: int
    of: int
    rms: float = 0.0
    largest: float = 0.0
    was: int = 0
    was_rms: float = 0.0


Array = NDArray[np.float64]
Change = Callable[[Oracle], Oracle]
Measure = Callable[[Change], Residual]


def can_be_tried(found: Examination, stage: Stage) -> bool:
    """Return whether the dump has the inputs from which a stage is recomputed, and its results."""
    step = found.step
    if stage is Stage.MERGE:
        return step.has("out", "lse") and _can_be_merged(step.partials)
    if stage is Stage.PREFILL:
        return found.right_prefill is not None
    if stage is Stage.LAYER:
        return found.right_layer is not None
    if step.batch is None or not is_valid(step):
        return False
    placed = step.has("slot_mapping") or step.has("block_table")
    appended = placed and step.before is not None and not step.computed
    return {
        Stage.METADATA: bool(step.planned),
        Stage.APPEND: appended and step.has(*LATENTS),
        Stage.GATHER: step.has("gathered_ckv", "gathered_k_pe") and not without_cache(step),
        Stage.QUERIES: step.has(*QUERIES, "query_codes", "query_scales"),
        Stage.ATTENTION: found.right is not None,
    }[stage]


def _can_be_merged(partials: list[Output]) -> bool:
    try:
        validate_partials(partials)
    except InvalidArgument:
        return False
    return True


def measure_of(found: Examination, stage: Stage, asked: NDArray[np.bool_] | None = None) -> Measure:
    """Return a function that compares the result of a changed oracle with the dump.

    Parameters
    ----------
    found : Examination
    stage : Stage
        A stage that :func:`can_be_tried`.
    asked : bool [T] or None
        The tokens whose attention is recomputed, all by default. Other tokens are compared only
        if the change does not affect them.
    """
    if stage is Stage.ATTENTION:
        return _of_attention(found, asked)
    if stage is Stage.PREFILL:
        return _beside_right(_of_prefill(found))
    if stage is Stage.LAYER:
        return _beside_right(_of_layer(found))
    measures = {
        Stage.METADATA: _of_metadata,
        Stage.APPEND: _of_append,
        Stage.GATHER: _of_gather,
        Stage.QUERIES: _of_queries,
        Stage.MERGE: _of_merge,
    }
    return _beside_right(measures[stage](found.step))


def _beside_right(measure: Measure) -> Measure:
    """Return a measure that also contains the errors without a change."""
    before = measure(lambda oracle: oracle)

    def beside(change: Change) -> Residual:
        return replace(measure(change), was=before.wrong, was_rms=before.rms)

    return beside


def _of_metadata(step: Step) -> Measure:
    batch = step.batch
    assert batch is not None

    def measure(change: Change) -> Residual:
        found = change(RIGHT).metadata(step.problem, batch)
        wrong = [step.array(own) != getattr(found, name) for name, own in step.planned.items()]
        return Residual(sum(int(w.sum()) for w in wrong), sum(w.size for w in wrong))

    return measure


def _of_append(step: Step) -> Measure:
    batch, before, after = step.batch, step.before, step.after
    assert batch is not None
    assert before is not None
    assert after is not None
    layout = step.problem.layout
    every = layout.slots(after.block_ids)  # a change may write any slot
    rotated = Rotated.of(step.problem, every)

    def measure(change: Change) -> Residual:
        own = replace(batch, ckv=copied(batch.ckv), k_pe=copied(batch.k_pe))  # a fault may write it
        mine = change(RIGHT).append(step.problem, own, before).read(after.block_ids)
        allowed, _ = allowed_bytes(layout, after.block_ids, after.blocks, mine, rotated)
        left = [
            differs(getattr(own, name), step.array(f"{name}_left"))
            for name in LATENTS
            if step.has(f"{name}_left")
        ]
        wrong = [~allowed, *left]
        return Residual(sum(int(w.sum()) for w in wrong), sum(w.size for w in wrong))

    return measure


def _of_gather(step: Step) -> Measure:
    batch, image = step.batch, step.after
    assert batch is not None
    assert image is not None

    def measure(change: Change) -> Residual:
        found = change(RIGHT).gather_context(step.problem, batch, image)
        wrong = np.zeros(len(found[0]), bool)
        for name, mine in zip(("gathered_ckv", "gathered_k_pe"), found, strict=True):
            wrong |= (bits(np.ascontiguousarray(mine)) != bits(step.array(name))).any(axis=1)
        return Residual(int(wrong.sum()), wrong.size)

    return measure


def _of_queries(step: Step) -> Measure:
    problem, batch, scale = step.problem, step.batch, query_scale(step.dump)
    assert batch is not None
    actual = step.array("query_codes"), step.array("query_scales")

    def measure(change: Change) -> Residual:
        mine = change(RIGHT).quantize_queries(problem, batch, scale)
        codes, scales, _ = wrong_queries(problem, batch, actual, mine, given=scale)
        wrong = codes.any(axis=2) | scales
        return Residual(int(wrong.sum()), wrong.size)

    return measure


def _of_prefill(found: Examination) -> Measure:
    step, right, batch = found.step, found.right_prefill, found.step.prefill
    assert right is not None
    assert batch is not None
    answer = right.rounded.output(step.problem.dtype)
    return _of_heads(
        step,
        lambda oracle: oracle.prefill(step.problem, batch),
        answer,
        actual_output(step, answer, "prefill_"),
        (right.out_budget, right.lse_budget),
        held=are_numbers(right.exact),
    )


def _of_layer(found: Examination) -> Measure:
    step, right = found.step, found.right_layer
    image = step.after
    assert right is not None
    assert image is not None
    answer = RIGHT.layer(step.problem, right.batch, image)
    return _of_heads(
        step,
        lambda oracle: oracle.layer(step.problem, right.batch, image),
        answer,
        actual_output(step, answer, "layer_"),
        right.allowed_in_parts(right.batch.workspace),
        held=are_numbers(right.exact),
    )


def _of_heads(
    step: Step,
    ask: Callable[[Oracle], Output],
    answer: Output,
    actual: Output,
    allowed: tuple[Array, Array],
    *,
    held: NDArray[np.bool_],
) -> Measure:
    """Return a measure of the values of each token and head.

    Only the tokens `held` are compared. A field that the dump lacks is compared with its right
    value.
    """
    absent = actual.out is answer.out, actual.lse is answer.lse

    def measure(change: Change) -> Residual:
        mine = ask(change(RIGHT))
        out = allowed[0][:, None] * _grown(mine.out, answer.out)
        out += ulp(_largest(mine.out), step.problem.dtype)
        kept = Output(answer.out if absent[0] else mine.out, answer.lse if absent[1] else mine.lse)
        shares, errors = distance(kept, actual, (out, allowed[1]))
        return _residual(shares[held], errors[held])

    return measure


def _of_merge(step: Step) -> Measure:
    assert step.lse is not None
    actual = Output(step.array("out"), step.lse)
    right = step.partials
    out_budget, lse_budget = budgets.merge_budget(right)
    out_budget += ulp(np.abs(widen(actual.out)).max(axis=2), step.problem.dtype)

    def measure(change: Change) -> Residual:
        parts = [Output(part.out.copy(), part.lse.copy()) for part in right]
        return _residual(*distance(change(RIGHT).merge(parts), actual, (out_budget, lse_budget)))

    return measure


def _of_attention(found: Examination, asked: NDArray[np.bool_] | None) -> Measure:
    step, right = found.step, found.right
    batch, image = step.batch, step.after
    assert batch is not None
    assert image is not None
    assert right is not None
    asked = np.ones(batch.num_tokens, bool) if asked is None else asked
    answer = right.rounded.output(step.problem.dtype)
    sample = Sample(step.problem, batch, image, answer, asked).oracle()
    actual, held = actual_output(step, answer), are_numbers(right.exact)

    def distances(mine: Output, tokens: NDArray[np.bool_]) -> tuple[Array, Array]:
        """Return shares and errors of some tokens, [n, H]; `mine` has only these tokens."""
        here = Output(answer.out[tokens], answer.lse[tokens])
        out = right.out_budget[tokens, None] * _grown(mine.out, here.out)
        out += ulp(_largest(mine.out), step.problem.dtype)
        allowed = out, right.lse_budget[tokens]
        theirs = Output(actual.out[tokens], actual.lse[tokens])
        return distance(_kept(step, here, mine), theirs, allowed)

    unchanged = distances(answer, np.ones(batch.num_tokens, bool))

    def measure(change: Change) -> Residual:
        mine = change(sample).attend(step.problem, batch, image)
        shares, errors = (array.copy() for array in unchanged)
        known = np.repeat(held[:, None], shares.shape[1], axis=1)
        changed = _changed_tokens(mine, answer)
        if changed.any():
            some = Output(mine.out[changed], mine.lse[changed])
            shares[changed], errors[changed] = distances(some, changed)
            unknown = np.isnan(some.lse) & np.isnan(some.out).all(axis=2)
            known[changed] &= asked[changed, None] | ~unknown
        before = _residual(unchanged[0][known], unchanged[1][known])
        found = _residual(shares[known], errors[known])
        return replace(found, was=before.wrong, was_rms=before.rms)

    return measure


def _changed_tokens(mine: Output, answer: Output) -> NDArray[np.bool_]:
    """Return which tokens have an output other than the right one, bool [T]."""
    if mine.out.dtype != answer.out.dtype:
        return np.ones(len(answer.lse), bool)
    out = bits(np.ascontiguousarray(mine.out)) != bits(answer.out)
    return np.asarray(out.any(axis=(1, 2)) | (bits(mine.lse) != bits(answer.lse)).any(axis=1))


def _kept(step: Step, answer: Output, mine: Output) -> Output:
    """Return the fields of `mine` that the dump has; other fields are those of `answer`."""
    return Output(
        mine.out if step.has("out") else answer.out,
        mine.lse if step.has("lse") else answer.lse,
    )


def _grown(mine: NDArray[Any], right: NDArray[Any]) -> NDArray[np.float64]:
    """Return the factor by which numbers are larger than the right ones, from 1 to 1e6, [T, H]."""
    of_right = _largest(right)
    grown = _largest(mine) / np.maximum(of_right, 1e-300)
    return np.where(of_right > 0, np.clip(grown, 1, 1e6), 1)


def _largest(out: NDArray[Any]) -> NDArray[np.float64]:
    """Return the largest finite magnitude of each query token and head, [T, H]."""
    wide = widen(out)
    largest: NDArray[np.float64] = np.abs(np.where(np.isfinite(wide), wide, 0)).max(axis=2)
    return largest


def distance(mine: Output, theirs: Output, allowed: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the differences of two outputs, relative to `allowed` and absolute, each [T, H].

    A relative difference is infinite if two numbers cannot be compared (:func:`differences`).

    Parameters
    ----------
    mine, theirs : Output
    allowed : (float64 [T, H], float64 [T, H])
        The allowed differences of out and of lse.
    """
    out, odd_out = differences(mine.out, theirs.out)
    lse, odd_lse = differences(mine.lse, theirs.lse)
    out = out.max(axis=2)
    lse_allowed = allowed[1] + ulp(np.abs(_finite(mine.lse)), "float32")
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.maximum(
            np.nan_to_num(out / allowed[0], posinf=np.inf),
            np.nan_to_num(lse / lse_allowed, posinf=np.inf),
        )
    return np.where(odd_out.any(axis=2) | odd_lse, np.inf, shares), np.maximum(out, lse)


def _residual(shares: Array, errors: Array) -> Residual:
    if not shares.size:
        return Residual(0, 0)
    rms = float(np.sqrt(np.mean(np.minimum(shares, _LARGEST_SHARE) ** 2)))
    return Residual(int((shares > 1).sum()), shares.size, rms, float(errors.max()))


def _finite(x: NDArray[Any]) -> NDArray[np.float64]:
    wide = widen(x)
    return np.where(np.isfinite(wide), wide, 0.0)
