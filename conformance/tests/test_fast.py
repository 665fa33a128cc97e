"""The budget for fast products of 8 bits accepts every way of rounding and no wrong scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.params import params_of_group, trace_params
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.faults.kernel.change import answering, scoring, with_batch, with_cache
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.e4m3 import decode, encode
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import DEEPSEEK_V3, SMALL
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

Array = NDArray[np.float64]

FAST = replace(CAPABILITIES, products="fast")
GROUPS = ("decode", "extend", "mixed", "verify", "formats")


def rounded(x: Array, scale: Array | float) -> Array:
    """Return numbers rounded to e4m3 at a scale."""
    return widen(decode(encode(x / scale))) * scale


def attending(
    query_scale: Callable[[Array], Array | float],
    *,
    by_rounded_sum: bool,
    part: int = 2**31,
    weight_scale: Callable[[Array], Array | float] = lambda _: 2.0**-7,
) -> Oracle:
    """Return an oracle that rounds queries and weights in a given way.

    If there are several parts of `part` keys, their outputs are rounded to the type of the output.
    The largest weight is 1; weights are rounded at `weight_scale`.
    """

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        query = rounded(query, query_scale(query))
        out, lse, *bounds = attend_one(problem, query, keys, rounding)
        scores = problem.softmax_scale * (query @ keys.T)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        coarse = rounded(weights, weight_scale(weights))
        summed = coarse if by_rounded_sum else weights
        total = summed.sum(axis=1, keepdims=True)
        out = np.zeros_like(out, np.float64)
        for keys_of_part in np.split(np.arange(len(keys)), range(part, len(keys), part)):
            share = summed[:, keys_of_part].sum(axis=1, keepdims=True)
            answer = coarse[:, keys_of_part] @ keys[keys_of_part, : problem.dims.kv_lora_rank]
            answer = np.divide(answer, share, out=np.zeros_like(answer), where=share > 0)
            if part < len(keys):
                answer = widen(round_to(answer, problem.dtype))
            out += answer * share / total
        return (out, lse, *bounds)

    return scoring(RIGHT, attend)


IMPLEMENTATIONS = {
    "a scale per head": attending(
        lambda q: np.abs(q).max(axis=1, keepdims=True) / 300, by_rounded_sum=True
    ),
    "a scale per token": attending(lambda q: np.abs(q).max() / 448, by_rounded_sum=False),
    "powers of two": attending(
        lambda q: np.exp2(np.ceil(np.log2(np.abs(q).max() / 448))), by_rounded_sum=True
    ),
    "partial results of 16 bits": attending(
        lambda q: np.abs(q).max(axis=1, keepdims=True) / 448, by_rounded_sum=True, part=8
    ),
    "exact": RIGHT,
}


def cases(group: str) -> list[Case]:
    """Return the small cases of a group that run in cache formats of 8 bits."""
    run = Run(ReferenceBackend(), "x:y", "small", load_profile(STRICT), ("bfloat16",))
    return [
        param.case
        for param in params_of_group(run, group)
        if param.case.cache_format in {"fp8_e4m3", "fp8_block_token"}
        and sum(row.seq_len * row.query_len for row in param.case.rows) < 4_000
    ]


@pytest.mark.parametrize("oracle", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("group", GROUPS)
def test_implementations_that_round_to_8_bits_are_within_budget(oracle: Oracle, group: str):
    """S-5, S-7: an implementation chooses the scales of queries and the sums of weights."""
    for case in cases(group):
        backend = ReferenceBackend(capabilities=FAST, oracle=oracle)
        Trial(backend, case, SMALL, "bfloat16").check_attention()


@pytest.mark.parametrize("cache_format", [None, "fp8_e4m3"])
def test_only_backends_that_declare_it_may(cache_format: str | None):
    """S-5: fast products are allowed only if declared, and only over caches of 8 bits."""
    [case] = [case for case in cases("decode") if case.id == "decode-h9"][:1]
    case, oracle = replace(case, cache_format=cache_format), IMPLEMENTATIONS["a scale per token"]
    declared = FAST if cache_format is None else CAPABILITIES
    trial = Trial(ReferenceBackend(capabilities=declared, oracle=oracle), case, SMALL, "bfloat16")
    with pytest.raises(Mismatch, match=r"\[S-5\] out"):
        trial.check_attention()


def with_scale(factor: float) -> Oracle:
    """Return an oracle that reads the layer's scale times a factor."""

    def change(_p: Problem, _b: Batch, image: CacheImage) -> CacheImage:
        layout = replace(image.layout, scale=image.layout.scale * factor)
        return replace(image, layout=layout)

    return with_cache(RIGHT, change)


WRONG = {
    "queries are not scaled back": with_batch(
        RIGHT, lambda _, b: replace(b, q_nope=b.q_nope / 16, q_pe=b.q_pe / 16)
    ),
    "a scale that is half as large": with_scale(0.5),
    "a scale that is a quarter too large": with_scale(1.25),
    "values without their scale": answering(
        RIGHT, lambda p, _, a: replace(a, out=a.out / a.out.dtype.type(p.cache_scale))
    ),
}


@pytest.mark.parametrize("name", ["scale-0.03", "scale-7"])
@pytest.mark.parametrize("oracle", WRONG.values(), ids=WRONG)
def test_a_wrong_scale_is_outside(oracle: Oracle, name: str):
    """S-11: a wrong scale is wrong with exact and with fast products."""
    [case] = [c for c in cases("formats") if (c.name, c.cache_format) == (name, "fp8_e4m3")]
    trial = Trial(ReferenceBackend(capabilities=FAST, oracle=oracle), case, SMALL, "bfloat16")
    with pytest.raises(Mismatch, match=r"\[S-[57]\] "):
        trial.check_attention()


def equal_scores() -> Case:
    """Return the case whose keys all have nearly the same weight."""
    [case] = [
        case
        for case in cases("formats")
        if (case.name, case.cache_format) == ("equal-scores", "fp8_e4m3")
    ]
    return case


def lse_of_rounded_weights(peak: float) -> Oracle:
    """Return an oracle with weights in e4m3, relative to `peak` above the highest score."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        out, lse, *bounds = attend_one(problem, query, keys, rounding)
        weights = np.exp(problem.softmax_scale * (query @ keys.T) - lse[:, None])
        scale = weights.max(axis=1, keepdims=True) * np.exp(peak)
        total = rounded(weights, scale * 2.0**-7).sum(axis=1)
        return (out, lse + np.log(total), *bounds)

    return scoring(RIGHT, attend)


def test_a_rounding_of_all_keys_must_not_appear_in_the_lse():
    """S-7: roundings of equal weights do not cancel out; a sum of exact weights has none."""
    backend = ReferenceBackend(capabilities=FAST, oracle=lse_of_rounded_weights(peak=0.3))
    trial = Trial(backend, equal_scores(), SMALL, "bfloat16")
    with pytest.raises(Mismatch, match=r"\[S-7\] lse"):
        trial.check_attention()


def test_equal_weights_may_be_midway_between_two_numbers():
    """S-5: the roundings of such weights are as large as possible, up and down.

    The dims are those of a model: with 32 columns the signs of these errors are not independent of
    the values, and some elements are outside the budget.
    """
    oracle = attending(
        lambda q: np.abs(q).max(axis=1, keepdims=True) / 448,
        by_rounded_sum=True,
        weight_scale=lambda w: np.median(w, axis=1, keepdims=True) / 136,  # of 128 and 144
    )
    backend = ReferenceBackend(capabilities=FAST, oracle=oracle)
    Trial(backend, equal_scores(), DEEPSEEK_V3, "bfloat16").check_attention()


def longer(factor: float) -> Oracle:
    """Return an oracle that rounds to 8 bits and multiplies its outputs by a factor."""
    of_8_bits = IMPLEMENTATIONS["a scale per head"]
    return answering(of_8_bits, lambda _p, _b, a: replace(a, out=a.out * a.out.dtype.type(factor)))


@pytest.mark.parametrize("factor", [0.97, 1.03])
@pytest.mark.parametrize("group", ["decode", "verify", "formats"])
def test_outputs_of_another_length_are_outside(factor: float, group: str):
    """S-5: budgets of single elements do not find 3 %, because errors have both signs."""

    def is_killed(case: Case) -> bool:
        backend = ReferenceBackend(capabilities=FAST, oracle=longer(factor))
        try:
            Trial(backend, case, SMALL, "bfloat16").check_attention()
        except Mismatch as mismatch:
            return str(mismatch).startswith("[S-5] mean gain of out")
        return False

    assert any(map(is_killed, cases(group)))


def test_schedules_run_in_other_formats_only_with_exact_products():
    """S-19: dense outputs have no allowance for fast products."""
    run = Run(
        ReferenceBackend(capabilities=FAST), "x:y", "small", load_profile(STRICT), ("bfloat16",)
    )
    assert not any("fp8" in param.id for param in trace_params(run))


def test_layers_run_only_over_plain_caches():
    """Layers have no budget for products of 8 bits, so they run in no format of 8 bits."""
    for capabilities, expected in ((FAST, 1), (CAPABILITIES, 5)):
        backend = ReferenceBackend(capabilities=capabilities)
        run = Run(backend, "x:y", "small", load_profile(STRICT), ("float32",))
        params = params_of_group(run, "layer")
        assert len({param.case.cache_format for param in params}) == expected
