"""An explained dump: the first broken rule, what explains it, and what is missing to decide."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dumped import ROWS, case, changed, dumped

from paged_mla_reference.explain.checks.answers import both_answers
from paged_mla_reference.explain.checks.dump_checks import examine
from paged_mla_reference.explain.checks.finding import State
from paged_mla_reference.explain.checks.step import LARGEST_BLOCK, Step
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.explain.hypotheses import ranking
from paged_mla_reference.explain.hypotheses.ordinary import dump_of
from paged_mla_reference.explain.render.maps import maps_of
from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.faults.kernel.change import answering, scoring, seeing, with_batch, writing
from paged_mla_reference.oracle import RIGHT
from paged_mla_reference.rules.attention import attend_one
from paged_mla_reference.rules.paging import context_lens, query_spans, used_blocks
from paged_mla_reference.rules.rounding import round_to
from paged_mla_shared.cases import GROUPS, Case, Row
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem, Rope, RopePairing

CACHE = ("cache_before", "cache_after", "block_ids")


def states(dump: Dump) -> dict[str, str]:
    return {f.what: str(f.state) for f in examine(Step.of(dump)).findings}


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_right_step_is_not_broken(cache_format: str):
    """S-11: in no format."""
    dtypes = {name: dtype for dtype, name in PLAIN_FORMAT_OF_DTYPE.items()}
    dtype = dtypes.get(cache_format, "bfloat16")
    named = None if cache_format in dtypes else cache_format
    found = explain(dumped(RIGHT, dtype, case(cache_format=named, block_size=16)))
    assert found.verdict == "No rule is broken."
    assert {f.state for f in found.found.findings} == {State.HELD}
    assert not found.fits


@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        ("causal-mask-is-top-left", "S-5", "out"),
        ("lse-in-base-2", "S-7", "lse"),
        ("the-last-token-is-not-written", "S-10", "bytes of the cache"),
        ("blocks-are-sorted", "S-9", "out"),
        ("scale-is-omitted", "S-5", "out"),
    ],
)
def test_a_known_fault_is_named(fault: str, rule: str, what: str):
    """The rule, the quantity, and the fault first, with its reports."""
    found = explain(dumped(fault))
    first = found.found.first
    assert first is not None
    assert (first.rule, first.what) == (rule, what)
    assert found.best[0].hypothesis.name == fault
    assert f"{fault} (" in found.cause
    assert all(citation in found.cause for citation in found.best[0].hypothesis.citations)


def test_bfloat16_is_no_veil():
    """S-4: rounded outputs are explained too."""
    found = explain(dumped("newest-key-is-not-counted", "bfloat16"))
    assert found.best[0].hypothesis.name == "newest-key-is-not-counted"


def test_a_large_step_is_searched_on_few_tokens(monkeypatch: pytest.MonkeyPatch):
    """A few tokens, more, all: the winner is tried on everything, the others are not."""
    monkeypatch.setattr(ranking, "FEW_PAIRS", 1)
    monkeypatch.setattr(ranking, "MORE_PAIRS", 1000)
    found = explain(dumped("keys-past-4096-are-dropped", of=case((Row(4200, 2), *ROWS))))
    best, *others = found.fits
    assert best.hypothesis.name == "keys-past-4096-are-dropped"
    assert best.residual.of == found.found.step.array("lse").size
    assert best.residual.was == 8
    assert {fit.residual.of for fit in others} != {best.residual.of}
    assert all(fit.residual.wrong <= fit.residual.was for fit in others)


def without_key(_problem, _batch, row, seen):
    out = seen.copy()
    if row == 3:
        out[:, 33] = False
    return out


def through_another_table(_problem, batch):
    table = batch.block_table.copy()
    table[0, 0] = batch.block_table[3, 1]
    return replace(batch, block_table=table)


def one_head_doubled(_problem, _batch, answer):
    answer.out[:, 2], answer.lse[:, 2] = answer.out[:, 1], answer.lse[:, 1]
    return answer


def one_slot_off(_problem, _batch, slots):
    slots[0] += 1
    return slots


def halved_scale(problem, query, keys, rounding):
    return attend_one(replace(problem, softmax_scale=0.37), query, keys, rounding)


@pytest.mark.parametrize(
    ("oracle", "said"),
    [
        (seeing(RIGHT, without_key), "row 3 does not see key 33"),
        (with_batch(RIGHT, through_another_table), "row 0 reads block "),
        (answering(RIGHT, one_head_doubled), "head 2 has the output of head 1"),
        (writing(RIGHT, one_slot_off), "written: token 0 to slot "),
        (scoring(RIGHT, halved_scale), "the scale is 2.0930"),
    ],
)
def test_a_single_fault_is_found(oracle, said: str):
    """What is in no catalogue is found by what a wrong query has."""
    found = explain(dumped(oracle))
    assert found.best
    assert said in found.best[0].hypothesis.name


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([3, 0, 1, 2], "the row before it"),
        ([1, 2, 3, 0], "the row after it"),
        ([0, 0, 0, 0], "the first row"),
    ],
)
def test_tables_of_other_rows(rows: list[int], name: str):
    """S-1: each row must read through its own row of the table."""

    def change(_: Problem, batch: Batch) -> Batch:
        return replace(batch, block_table=batch.block_table[rows])

    step = case((Row(70, 1), Row(130, 1), Row(65, 3), Row(101, 2)))
    cause = explain(dumped(with_batch(RIGHT, change), of=step)).cause
    assert f"every row reads through the table of {name}" in cause


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([3, 2, 1, 0], "4 tokens have the outputs of other tokens: token 0 that of 3,"),
        ([0, 2, 3, 1], "3 tokens have the outputs of other tokens: token 1 that of 2,"),
    ],
)
def test_outputs_of_other_tokens(order: list[int], said: str):
    """S-5: an engine may pack rows in another order and not restore it."""

    def change(_p: Problem, _b: Batch, answer: Output) -> Output:
        return Output(answer.out[order], answer.lse[order])

    step = case((Row(70, 1), Row(130, 1), Row(65, 1), Row(101, 1)))
    assert said in explain(dumped(answering(RIGHT, change), of=step)).cause


@pytest.mark.parametrize("rows", ["one query token", "several query tokens"])
@pytest.mark.parametrize("fault", ["causal-mask-is-top-left", "scale-is-omitted"])
def test_a_fault_of_some_rows(fault: str, rows: str):
    """S-5: a kernel may have another path for rows of one token."""
    wrong = CATALOGUE[fault].change(RIGHT)

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        out, of_rows = RIGHT.attend(problem, batch, image), wrong.attend(problem, batch, image)
        for span in query_spans(batch):
            if (span.stop - span.start > 1) == (rows == "several query tokens"):
                out.out[span], out.lse[span] = of_rows.out[span], of_rows.lse[span]
        return out

    found = explain(dumped(replace(RIGHT, attend=attend)))
    assert found.best[0].hypothesis.name == f"{fault} in rows of {rows}"
    assert found.best[0].fits


def test_nothing_fits():
    """The report states that no hypothesis fits."""
    dump = dumped()
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(dump.arrays["out"].shape).astype(np.float32)
    found = explain(changed(dump, out=dump.arrays["out"] + noise))
    assert found.cause.startswith("No hypothesis fits")
    assert not found.best


def test_lengths_alone():
    """S-2: lengths are checked without anything else, and what is missing is named."""
    names = ("cu_seqlens_q", "seq_lens")
    dump = dumped()
    dump = replace(dump, arrays={name: dump.arrays[name] for name in names})
    found = explain(dump)
    assert not found.is_broken
    assert "undecided: positions, slots, bytes of the cache, out, lse" in found.verdict
    bad = changed(dump, seq_lens=np.array([37, 2, 0, 130, 9], np.int32))
    first = explain(bad).found.first
    assert first is not None
    assert (first.rule, first.what) == ("S-2", "seq_lens")


def test_nothing_at_all():
    """An empty dump is no error."""
    found = explain(replace(dumped(), arrays={}))
    assert "the dump has no cu_seqlens_q, seq_lens" in found.found.findings[0].detail


@pytest.mark.parametrize("missing", ["block_table", "slots"])
def test_positions_alone(missing: str):
    """S-3: slots without a block table do not show a cause."""
    found = explain(dumped("context-is-added-twice", without=(missing,)))
    assert found.best[0].hypothesis.name == "context-is-added-twice"
    dump = dumped(without=("block_table",))
    late = changed(dump, positions=dump.arrays["positions"] + 1)
    assert explain(late).best[0].hypothesis.name == "positions of 14 tokens are off by +1"


def test_without_a_cache():
    """S-6, S-9: NaN and zeros are found all the same."""
    dump = dumped(without=CACHE)
    assert states(dump)["values of out and lse"] == "undecided"
    assert states(dump)["zeros, NaN and -inf"] == "held"
    out = dump.arrays["out"].copy()
    out[3] = np.nan
    first = examine(Step.of(changed(dump, out=out))).first
    assert first is not None
    assert first.rule == "S-9"
    assert "token 3" in first.detail


@pytest.mark.parametrize("lse", [0.0, -np.inf])
def test_an_unwritten_output_without_a_cache(lse: float):
    """S-5: an output of 0 with an lse that no keys can have is wrong."""
    dump = dumped(without=CACHE)
    out, wrong = dump.arrays["out"].copy(), dump.arrays["lse"].copy()
    out[3], wrong[3] = 0, lse
    first = examine(Step.of(changed(dump, out=out, lse=wrong))).first
    assert first is not None
    assert (first.rule, first.what) == ("S-5", "zeros, NaN and -inf")
    assert "token 3" in first.detail


def test_outputs_of_zero_without_a_cache_may_be_right():
    """S-5: they are right if all latents that a query sees are 0."""
    dump = dumped(without=CACHE)
    out = dump.arrays["out"].copy()
    out[3] = 0
    for step in (changed(dump, out=out), changed(dumped(without=(*CACHE, "lse")), out=out)):
        found = examine(Step.of(step))
        assert found.first is None
        [zeros] = [f for f in found.findings if f.what == "outputs of 0"]
        assert zeros.state is State.UNDECIDED
        assert "token 3" in zeros.detail


@pytest.mark.parametrize("of", [c for c in GROUPS["formats"] if c.name.startswith("small-tokens")])
def test_right_outputs_of_zero_latents_without_a_cache(of: Case):
    """S-5: the first queries see only keys whose latents are stored as 0."""
    dump = dumped(of=of, without=(*CACHE, "scales_before", "scales_after", "ckv", "k_pe"))
    assert (dump.arrays["out"][0] == 0).all()
    assert examine(Step.of(dump)).first is None


def test_a_prompt_needs_no_cache():
    """S-5: without a context the step's own latents are the cache."""
    fresh = case((Row(9, 9), Row(5, 5)))
    found = explain(dumped("causal-mask-is-top-left", of=fresh, without=CACHE))
    assert not found.is_broken  # top left is bottom right there
    found = explain(dumped("lse-in-base-2", of=fresh, without=CACHE))
    assert "lse-in-base-2" in [fit.hypothesis.name for fit in found.best]


def test_numbers_of_one_head():
    """S-5, S-7: an error in one of four heads is reported for that head."""
    dump = dumped()
    for name, change, said in (
        ("lse", lambda x: x + np.float32(0.3), "lse of head 2 is 1 times .*, plus 0.3"),
        ("out", lambda x: x * np.float32(1.5), "out of head 2 is 1.5 times"),
    ):
        spoilt = dump.arrays[name].copy()
        spoilt[:, 2] = change(spoilt[:, 2])
        cause = explain(changed(dump, **{name: spoilt})).cause.replace("\n", " ")
        assert re.search(said, cause), cause


@pytest.mark.parametrize("wrong", ["", "newest-key-is-not-counted"])
def test_nan_that_follows_from_inputs(wrong: str):
    """S-9: a query that sees NaN has a NaN output; other queries are still checked."""
    [step] = build_steps(case(), SMALL, "float32")
    step.batch.ckv[1:4, 5] = np.nan  # of row 1, the latents of all three queries
    dump = dump_of(step, CATALOGUE[wrong].change(RIGHT) if wrong else RIGHT)
    dump.arrays["out"][1] = 1  # that they hide it is not held either
    found = explain(dump)
    [told] = [f for f in found.found.findings if f.what == "out, lse of tokens with NaN"]
    assert told.detail.startswith("3 tokens have NaN or infinite queries or keys: token 1")
    assert found.is_broken == bool(wrong)
    json.dumps(maps_of(found.found).as_dict(), allow_nan=False)
    assert wrong in [*(fit.hypothesis.name for fit in found.best), ""]


@pytest.mark.parametrize("missing", ["out", "lse"])
def test_a_dump_with_only_out_or_lse(missing: str):
    """S-5, S-7: out or lse is enough to find the cause."""
    found = explain(dumped("newest-key-is-not-counted", without=(missing,)))
    assert found.best[0].hypothesis.name == "newest-key-is-not-counted"


def test_without_the_cache_before():
    """S-10: the step's tokens are looked for in their slots."""
    dump = dumped("slots-are-one-late", without=("cache_before",))
    first = examine(Step.of(dump)).first
    assert first is not None
    assert (first.rule, first.what) == ("S-10", "tokens of the step in the cache")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope": Rope(RopePairing.NEOX)},
        {"cache_format": "fp8_block_token", "rope": Rope(RopePairing.INTERLEAVED)},
        {"cache_format": "fp8_block_group"},
        {"cache_format": "fp8_ds_mla"},
    ],
    ids=str,
)
def test_tokens_that_are_not_there(fields: dict[str, Any]):
    """S-10, S-11: without the cache before, in every format, rotated or not."""
    what = "tokens of the step in the cache"
    dump = dumped(of=case(block_size=16, **fields), without=("cache_before", "scales_before"))
    assert states(dump)[what] == "held"
    step = Step.of(dump)
    assert step.batch is not None
    block, token = divmod(int(RIGHT.metadata(step.problem, step.batch).slot_mapping[0]), 16)
    cache = dump.arrays["cache_after"].copy()
    cache[dump.arrays["block_ids"].tolist().index(block), token] = 0
    assert states(changed(dump, cache_after=cache))[what] == "broken"


def test_attention_may_not_write():
    """S-10: without latents the rest of the cache is held all the same."""
    dump = dumped(without=("ckv", "k_pe"))
    assert states(dump)["the rest of the cache"] == "held"
    cache = dump.arrays["cache_after"].copy()
    cache[-1, -1, 2] = 5
    assert states(changed(dump, cache_after=cache))["the rest of the cache"] == "broken"


def test_a_lse_of_base_2_may_be_meant():
    """S-7: a dump specifies the base of its lse."""
    dump = dumped("lse-in-base-2")
    assert not explain(replace(dump, lse_base="2")).is_broken


@pytest.mark.parametrize("dtype", PLAIN_FORMAT_OF_DTYPE)
def test_parts_are_merged(dtype: str):
    """S-8: the output is the merge of its parts, rounded to the problem's dtype."""
    rng = np.random.default_rng(0)
    plain = PLAIN_FORMAT_OF_DTYPE[dtype]
    problem = replace(dumped().problem, dtype=dtype, cache_format=plain)
    shape = (2, 3, problem.dims.num_heads)
    parts = [
        Output(
            rng.standard_normal((*shape[1:], 32), np.float32),
            rng.standard_normal(shape[1:], np.float32),
        )
        for _ in range(2)
    ]
    merged = RIGHT.merge(parts)
    arrays = {
        "partial_out": np.stack([p.out for p in parts]),
        "partial_lse": np.stack([p.lse for p in parts]),
        "out": round_to(merged.out, dtype),
        "lse": merged.lse,
    }
    dump = Dump(problem=problem, arrays=arrays)
    assert not explain(dump).is_broken
    mean = round_to(np.mean(arrays["partial_out"], axis=0), dtype)
    found = explain(changed(dump, out=mean))
    assert found.best[0].hypothesis.name == "partials-are-averaged"


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_parts_that_cannot_be_merged(odd: float):
    """S-8: an lse that no part may have is a broken rule, not a dump that is refused."""
    dump = dumped()
    arrays = {f"partial_{name}": dump.arrays[name][None].copy() for name in ("out", "lse")}
    arrays["partial_lse"][0, 1, 2] = odd
    found = explain(changed(dump, **arrays))
    assert found.verdict.startswith("S-8 is broken in merged partial results: lse: got NaN or +inf")


def test_no_parts():
    """S-8: parts with an empty first axis do not change the cause."""
    dump = dumped("lse-in-base-2")
    none = {f"partial_{name}": dump.arrays[name][None][:0] for name in ("out", "lse")}
    assert explain(changed(dump, **none)).best[0].hypothesis.name == "lse-in-base-2"


def test_blocks_that_are_not_listed():
    """S-1: rows are not read through blocks that the dump leaves out."""
    dump = dumped()
    table = dump.arrays["block_table"].copy()
    other = np.setdiff1d(np.arange(dump.problem.num_blocks), dump.arrays["block_ids"])
    table[0, 0] = other[0]
    dump = changed(dump, block_table=table)
    assert "lacks blocks of 1 rows; row 0 is the first" in str(
        [f.detail for f in examine(Step.of(dump)).findings]
    )


def test_a_block_of_earlier_steps_that_is_not_listed():
    """S-1: an append does not add the keys of earlier steps to a block that the dump leaves out."""
    dump = dumped()
    step = Step.of(dump)
    contexts, size = context_lens(step.batch), dump.problem.block_size
    [row, *_] = np.flatnonzero(
        (contexts > 0) & (contexts // size == (step.batch.seq_lens - 1) // size)
    )
    block = used_blocks(step.batch, row, size)[-1]  # it gets the new tokens of the row too
    kept = dump.arrays["block_ids"] != block
    cache = {"block_ids": dump.arrays["block_ids"][kept]}
    cache["cache_before"] = dump.arrays["cache_before"][kept]
    arrays = {name: array for name, array in dump.arrays.items() if name != "cache_after"} | cache
    step = Step.of(replace(dump, arrays=arrays))
    assert step.computed
    assert row in step.unlisted_rows()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"block_ids": np.zeros(12, np.int64)}, "block_ids.*the same block twice"),
        ({"block_ids": np.arange(12) - 1}, "block_ids.*outside"),
        ({"unlisted": np.zeros(7, np.uint8)}, "unlisted.*7 bytes"),
    ],
)
def test_caches_that_cannot_be(arrays, message: str):
    """Blocks are listed once, inside the cache."""
    dump = dumped()
    count = len(dump.arrays["block_ids"])
    arrays = {n: x[:count] if n == "block_ids" else x for n, x in arrays.items()}
    with pytest.raises(InvalidArgument, match=message):
        explain(changed(dump, **arrays))


def test_problems_that_cannot_be():
    """Untrusted sizes are checked before memory is allocated."""
    dump = dumped()
    for fields, message in (
        ({"block_size": LARGEST_BLOCK}, "block_size"),
        ({"block_size": -1}, "block_size"),
        ({"softmax_scale": -1.0}, "softmax_scale"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Step.of(replace(dump, problem=replace(dump.problem, **fields), arrays={}))
    few = {name: dump.arrays[name] for name in ("cu_seqlens_q", "seq_lens")}
    huge = replace(dump.problem, max_model_len=2**31, block_size=1)
    few["seq_lens"] = np.full(5, 2**31 - 1, np.int32)
    with pytest.raises(InvalidArgument, match="without a block_table"):
        Step.of(replace(dump, problem=huge, arrays=few))
    long = {"cu_seqlens_q": np.array([0, 2**31 - 1], np.int32), "seq_lens": np.ones(1, np.int32)}
    with pytest.raises(InvalidArgument, match="cu_seqlens_q: got 2147483647 tokens"):
        Step.of(replace(dump, arrays=long))
    wide = replace(dump.problem, dims=replace(dump.problem.dims, num_heads=2**40))
    few["seq_lens"] = dump.arrays["seq_lens"]
    assert not explain(replace(dump, problem=wide, arrays=few)).is_broken


def test_shares_of_tokens_make_one_output():
    """S-5: many tokens are computed on all cores, with the same bits as on one core."""
    step = Step.of(dumped(of=case((*ROWS, Row(80, 80)))))
    exact, _ = both_answers(step.problem, step.batch, step.after)
    alone = RIGHT.attend(step.problem, step.batch, step.after)
    np.testing.assert_allclose(exact.out, alone.out, atol=1e-5)
    assert not np.isnan(exact.lse).any()


def test_json_holds_no_odd_numbers():
    """NaN and infinities are null in JSON."""
    found = explain(dumped("empty-rows-divide-zero-by-zero", of=case(padded_tokens=2)))
    document = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert document["broken"]
    assert document["hypotheses"][0]["name"] == "empty-rows-divide-zero-by-zero"
    assert document["findings"][0]["state"] == "held"


@pytest.mark.parametrize(
    ("times", "what"), [(-1, "leave out the step's tokens"), (1, "count the step's tokens twice")]
)
def test_lengths_of_another_convention(times: int, what: str):
    """S-2, S-4: queries of a step are aligned to the end of lengths that are another's."""

    def change(_: Problem, batch: Batch) -> Batch:
        return replace(batch, seq_lens=batch.seq_lens + times * batch.query_lens)

    rows = case((Row(37, 2), Row(70, 3)), block_size=64)
    found = explain(dumped(with_batch(RIGHT, change), of=rows))
    assert found.best[0].hypothesis.name == f"the rows' lengths {what}"
