"""Check the attention of a whole layer, between its projections."""

from __future__ import annotations

import numpy as np

from paged_mla_reference.explain.checks.errors import actual_output
from paged_mla_reference.explain.checks.examination import (
    Examination,
    blinded,
    hold_answer,
    lacking_in,
    unknown_tokens,
)
from paged_mla_reference.explain.checks.finding import Finding, Stage, State
from paged_mla_reference.explain.checks.step import LAYER, Step
from paged_mla_reference.rules.validation.inputs import validate_layer
from paged_mla_reference.tolerance.compare import check_layer as check_answer
from paged_mla_reference.tolerance.layers import RightLayer
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask

ANSWER = ("layer_out", "layer_lse")
MOST_PAIRS = 1 << 26  # triples of query, key and head: every hypothesis is tried on all of them
MOST_ELEMENTS = 1 << 27  # of keys and values of every head


def check_layer(found: Examination, lacking: str) -> None:
    """Check that a layer's out and lse are each within their budgets (S-6, S-9, S-21).

    `lacking` is the reason why keys cannot be read, or "".
    """
    step, stage = found.step, Stage.LAYER
    given = [name for name in ANSWER if step.has(name)]
    if step.layer is None:
        if given:
            detail = lacking_in(step, *LAYER)
            found.findings.append(Finding.undecided(stage, "out, lse", detail))
        return
    try:
        validate_layer(step.problem, step.layer)
    except InvalidArgument as error:
        found.findings.append(Finding(stage, error.argument, State.BROKEN, "S-21", str(error)))
        return
    if not given:
        lacking = "the dump has no layer_out or layer_lse"
    elif step.problem.mask is not Mask.CAUSAL or step.dump.products != "exact":
        lacking = "layers can be checked only with a causal mask and exact products"
    elif not lacking and _is_large(step):
        lacking = "the layer has too many keys, queries and heads: dump fewer rows or heads"
    if lacking:
        found.findings.append(Finding.undecided(stage, "out, lse", lacking))
        return
    assert step.after is not None
    found.right_layer = right = RightLayer.of(step.problem, step.layer, step.after)
    batch, allowed = right.batch.step, right.allowed_in_parts(right.batch.workspace)
    odd = unknown_tokens(found, stage, batch, right.exact)
    exact = blinded(right.exact, odd)
    answer = exact.output("float32")
    hold_answer(
        found,
        stage,
        "layer_",
        (blinded(actual_output(step, answer, "layer_"), odd), answer),
        lambda alone: check_answer(batch, alone, exact, allowed),
    )


def _is_large(step: Step) -> bool:
    assert step.layer is not None
    batch, dims = step.layer.step, step.problem.dims
    lens = batch.seq_lens.astype(np.int64)
    elements = int(lens.sum()) * dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    pairs = int(batch.query_lens @ lens) * dims.num_heads
    return pairs > MOST_PAIRS or elements > MOST_ELEMENTS
