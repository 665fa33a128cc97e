"""Run every check that a dump allows, in the order in which a fault spreads through a step.

The order is: metadata, bytes of the append, gathered context, 8-bit queries, the merge of partial
results, attention, a whole layer, and a prefill. The check of attention uses the dump's cache
after the append, so that a wrong append is not reported twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import actual_output
from paged_mla_reference.explain.checks.examination import (
    Examination,
    Right,
    blinded,
    hold,
    hold_answer,
    lacking_in,
    unknown_tokens,
)
from paged_mla_reference.explain.checks.finding import Finding, Stage, State
from paged_mla_reference.explain.checks.layer_checks import check_layer
from paged_mla_reference.explain.checks.prefill_checks import check_prefill
from paged_mla_reference.explain.checks.step import LATENTS, LENGTHS, QUERIES, Step, query_scale
from paged_mla_reference.rules.cache import append, gather_context, slots_to_write
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.paging import context_lens, keys_of_tokens
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.queries import quantize_queries
from paged_mla_reference.rules.rounding import ulp, widen
from paged_mla_reference.rules.slots import Slots
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_reference.tolerance import caches, compare
from paged_mla_reference.tolerance.compare import Check, Mismatch
from paged_mla_reference.tolerance.pattern import describe
from paged_mla_reference.tolerance.queries import check_queries
from paged_mla_shared.backend import OPERATIONS
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Metadata, Output

MOST_PAIRS = 1 << 33  # of a query token and a key
_RULE_OF = {
    "block_table": "S-1",
    "slot_mapping": "S-10",
    "mask": "S-14",
    "max_draft_tokens": "S-14",
}


def examine(step: Step) -> Examination:
    """Run every check that the dump allows, and return all findings."""
    found = Examination(step, [])
    of_prefill_alone = step.prefill is not None and not any(step.has(name) for name in LENGTHS)
    valid = not of_prefill_alone and _check_inputs(found)
    if valid:
        _check_plan(found)
        _check_append(found)
        _check_left(found)
        _check_gather(found)
        _check_queries(found)
    _check_merge(found)
    if valid:
        _check_attention(found)
        check_layer(found, without_cache(step))
    check_prefill(found)
    return found


def _check_inputs(found: Examination) -> bool:
    """Validate lengths, tables, slots and masks; return whether the rules allow them.

    Return false too if the dump lacks lengths or a mask.
    """
    step, stage = found.step, Stage.METADATA
    what = "lengths, table" if step.has("block_table") else "lengths"
    if step.batch is None:
        detail = f"{lacking_in(step, *LENGTHS)}, so its tokens cannot be assigned to rows"
        found.findings.append(Finding.undecided(stage, what, detail))
        return False
    if step.problem.mask is Mask.TREE and not step.has("mask"):
        detail = f"{lacking_in(step, 'mask')}, so the keys that a draft token sees are unknown"
        found.findings.append(Finding.undecided(stage, what, detail))
        return False
    try:
        validate_batch(step.problem, step.batch)
    except InvalidArgument as error:
        rule = _RULE_OF.get(error.argument, "S-2")
        found.findings.append(Finding(stage, error.argument, State.BROKEN, rule, str(error)))
        return False
    given = [n for n in (*LENGTHS, "block_table", "mask", "slot_mapping") if step.has(n)]
    found.findings.append(Finding.held(stage, ", ".join(given), [Check(what, 0.0, 0.0)]))
    return True


def _check_plan(found: Examination) -> None:
    """Check that positions and slots are exact (S-1, S-3)."""
    step, stage = found.step, Stage.METADATA
    assert step.batch is not None
    right = metadata(step.problem, step.batch)
    for field, name in (("positions", "positions"), ("slots", "slot_mapping")):
        lacking = lacking_in(step, field, *(("block_table",) if field == "slots" else ()))
        if lacking:
            found.findings.append(Finding.undecided(stage, field, lacking))
            continue
        others = {"positions": right.positions, "slot_mapping": right.slot_mapping}
        actual = Metadata(**others | {name: step.array(field)})
        hold(found, stage, field, lambda a=actual: compare.check_metadata(step.batch, a, right))


def _check_append(found: Examination) -> None:
    """Check every byte of the cache (S-10).

    Without the cache before the step, only the bytes of the step's tokens are checked.
    """
    step, stage = found.step, Stage.APPEND
    problem, batch, what = step.problem, step.batch, "bytes of the cache"
    assert batch is not None
    lacking = "" if step.has("slot_mapping") else lacking_in(step, "block_table")
    if step.after is None or step.computed:
        lacking = lacking or "the dump has no cache after the append"
    if lacking or not (step.has(*LATENTS) or step.before is not None):
        lacking = lacking or lacking_in(step, *LATENTS)
        found.findings.append(Finding.undecided(stage, what, lacking))
        return
    if not step.has(*LATENTS):
        _check_rest(found)
        return
    assert step.after is not None
    start = step.before
    if start is None:  # a right append to the cache after the step changes no byte of it
        start, what = step.after, "tokens of the step in the cache"
    slots = slots_to_write(problem, batch)
    expected = append(problem, batch, start)
    hold(
        found,
        stage,
        what,
        lambda: caches.check_cache(
            problem.layout,
            step.after.block_ids,
            step.after.blocks,
            expected.read(step.after.block_ids),
            caches.Writer(batch, slots),
            rotated=caches.Rotated.of(problem, slots),
        ),
    )
    if step.before is None:
        detail = "the dump has no cache before the step, so other writes cannot be found"
        found.findings.append(Finding.undecided(stage, "the rest of the cache", detail))


def _check_left(found: Examination) -> None:
    """Check that the append left its inputs unchanged (S-10)."""
    step, stage, what = found.step, Stage.APPEND, "latents after the append"
    names = [name for name in LATENTS if step.has(name, f"{name}_left")]
    if not names:
        return
    batch = step.batch
    assert batch is not None
    pairs = [(name, step.array(f"{name}_left"), step.array(name)) for name in names]
    hold(found, stage, what, lambda: caches.check_left(batch, pairs))


def _check_rest(found: Examination) -> None:
    """Check every byte except those of the step's tokens, whose latents are unknown (S-10)."""
    step, stage, what = found.step, Stage.APPEND, "the rest of the cache"
    detail = f"{lacking_in(step, *LATENTS)}, so the bytes to write are unknown"
    found.findings.append(Finding.undecided(stage, "tokens of the step in the cache", detail))
    layout, before, after = step.problem.layout, step.before, step.after
    assert step.batch is not None
    assert before is not None
    assert after is not None
    if layout.format.couples_tokens:
        detail = "in this format, the step's latents also change the bytes of other tokens"
        found.findings.append(Finding.undecided(stage, what, detail))
        return
    slots = slots_to_write(step.problem, step.batch)
    written = slots[(slots >= 0) & np.isin(slots // layout.block_size, after.block_ids)]
    expected = before.read(after.block_ids)
    places = _places(after, written)
    at, mine = (Slots(layout, blocks, *places) for blocks in (expected, after.blocks))
    at.rows[at.at] = mine.rows[mine.at]
    if at.scales.size:
        at.scales[at.scale_at] = mine.scales[mine.scale_at]
    hold(
        found,
        stage,
        what,
        lambda: caches.check_cache(layout, after.block_ids, after.blocks, expected),
    )


def _places(
    image: CacheImage, slots: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each slot, the index of its block in the image and its offset in the block."""
    order = np.argsort(image.block_ids)
    size = image.layout.block_size
    block = order[np.searchsorted(image.block_ids, slots // size, sorter=order)]
    return block, slots % size


def _check_gather(found: Examination) -> None:
    """Compare gathered context with the cache (S-1, S-9)."""
    step, stage, what = found.step, Stage.GATHER, "gathered context"
    if not step.has("gathered_ckv", "gathered_k_pe"):
        return
    lacking = without_cache(step)
    if lacking:
        found.findings.append(Finding.undecided(stage, what, lacking))
        return
    assert step.batch is not None
    assert step.after is not None
    expected = gather_context(step.problem, step.batch, step.after)
    actual = step.array("gathered_ckv"), step.array("gathered_k_pe")
    hold(
        found,
        stage,
        what,
        lambda: caches.check_read(OPERATIONS["gather_context"], actual, expected),
    )


def _check_queries(found: Examination) -> None:
    """Compare codes and scales of 8-bit queries with the queries (S-11, S-12)."""
    step, stage, what = found.step, Stage.QUERIES, "codes and scales of queries"
    if not step.has("query_codes", "query_scales"):
        return
    lacking = lacking_in(step, *QUERIES)
    if lacking:
        found.findings.append(Finding.undecided(stage, what, lacking))
        return
    assert step.batch is not None
    problem, batch = step.problem, step.batch
    given = query_scale(step.dump)
    expected = quantize_queries(problem, batch, given)
    actual = step.array("query_codes"), step.array("query_scales")
    hold(
        found,
        stage,
        what,
        lambda: check_queries(problem, batch, actual, expected, given=given),
    )


def _check_merge(found: Examination) -> None:
    """Compare the output with the merge of its partial results (S-8)."""
    step, stage, what = found.step, Stage.MERGE, "merged partial results"
    lse, partials = step.lse, step.partials
    if not partials:
        return
    if lse is None or not step.has("out"):
        found.findings.append(Finding.undecided(stage, what, lacking_in(step, "out", "lse")))
        return
    try:
        expected = merge(partials)
    except InvalidArgument as error:
        found.findings.append(Finding(stage, what, State.BROKEN, "S-8", str(error)))
        return
    out, wide = step.array("out"), widen(step.array("out"))
    if step.problem.dtype != "float32":  # a difference within the output's rounding is no error
        lost = np.abs(wide - expected.out) <= ulp(np.abs(wide), step.problem.dtype)
        out = np.where(lost, expected.out, wide).astype(np.float32)
    hold(found, stage, what, lambda: compare.check_merge(Output(out, lse), expected, partials))


def without_cache(step: Step) -> str:
    """Return why the keys of some rows cannot be read; "" if all can be read."""
    if lacking := lacking_in(step, "block_table"):
        return lacking
    if step.after is None:
        return "the dump has no cache: add block_ids and cache_after"
    rows = step.unlisted_rows()
    if rows.size:
        return f"the dump lacks blocks of {len(rows)} rows; row {rows[0]} is the first"
    return ""


def _check_attention(found: Examination) -> None:
    """Check that out and lse are each within their budgets (S-5, S-6, S-7, S-9)."""
    step, stage, batch = found.step, Stage.ATTENTION, found.step.batch
    assert batch is not None
    if not (step.has("out") or step.has("lse")):
        if step.layer is not None:
            return  # check_layer checks the output of a layer
        found.findings.append(Finding.undecided(stage, "out, lse", "the dump has no out or lse"))
        return
    lacking = lacking_in(step, *QUERIES) or without_cache(step)
    if not lacking and int(batch.query_lens @ batch.seq_lens.astype(np.int64)) > MOST_PAIRS:
        lacking = (
            f"the step has more than {MOST_PAIRS} pairs of a query token and a key: dump fewer rows"
        )
    if lacking:
        found.findings.append(Finding.undecided(stage, "values of out and lse", lacking))
        hold(found, stage, "zeros, NaN and -inf", lambda: _check_anomalies(step, batch))
        _, unknown = _zeros(step, batch)
        if unknown.any():
            detail = "right only if all latents that these tokens see are 0: "
            detail += describe(unknown, batch)
            found.findings.append(Finding.undecided(stage, "outputs of 0", detail))
        return
    assert step.after is not None
    found.right = right = Right.of(step, batch, step.after)
    odd = unknown_tokens(found, stage, batch, right.exact)
    exact, rounded = blinded(right.exact, odd), blinded(right.rounded, odd)
    answer = rounded.output(step.problem.dtype)
    hold_answer(
        found,
        stage,
        "",
        (blinded(actual_output(step, answer), odd), answer),
        lambda alone: compare.check_output(
            step.problem, batch, alone, exact, rounded, allowance=right.allowance, keys=right.keys
        ),
    )


def _check_anomalies(step: Step, batch: Batch) -> list[Check]:
    """Check out and lse for NaN, infinities and wrong zeros, without a cache (S-5, S-6, S-9)."""
    keys = keys_of_tokens(batch)  # 0 for padding
    empty = keys == 0
    if step.has("out"):
        out = widen(step.array("out"))
        _refuse(empty & (out != 0).any(axis=(1, 2)), "S-6", "out", "not 0 for padding", batch)
        bad = ~np.isfinite(out).all(axis=2)
        _refuse(np.asarray(bad), "S-9", "out", "NaN or infinite", batch)
        unwritten, _ = _zeros(step, batch)
        why = "all 0, with an lse that no keys have, although the row has keys"
        _refuse(unwritten, "S-5", "out", why, batch)
    if step.lse is not None:
        lse = step.lse
        _refuse(empty[:, None] & ~np.isneginf(lse), "S-6", "lse", "not -inf for padding", batch)
        _refuse(np.isnan(lse) | np.isposinf(lse), "S-9", "lse", "NaN or +inf", batch)
    return [Check("anomalies", 0.0, 0.0)]


def _zeros(step: Step, batch: Batch) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which tokens with keys have outputs of 0, as two masks, bool [T].

    The first mask has the outputs that are wrong, and the second those that may be right. An output
    of 0 is right if the query sees only latents of 0. The lse is then not -inf. An lse of 0 in all
    heads can be right for a single key; a query after a context sees at least two keys.
    """
    keys = keys_of_tokens(batch)
    if not step.has("out"):
        return np.zeros(len(keys), bool), np.zeros(len(keys), bool)
    zeros = (keys > 0) & (widen(step.array("out")) == 0).all(axis=(1, 2))
    if step.lse is None:
        return np.zeros(len(keys), bool), zeros
    context = np.zeros_like(keys)
    context[: int(batch.cu_seqlens_q[-1])] = np.repeat(context_lens(batch), batch.query_lens)
    wrong = np.isneginf(step.lse).all(axis=1) | ((step.lse == 0).all(axis=1) & (context > 0))
    return zeros & wrong, zeros & ~wrong


def _refuse(wrong: NDArray[np.bool_], rule: str, what: str, why: str, batch: Batch) -> None:
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Mismatch(rule, what, f"{why}: {describe(wrong, batch)}", at)
