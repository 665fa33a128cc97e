"""Check a prefill: attention over keys and values of every head, which reads no cache."""

from __future__ import annotations

import numpy as np

from paged_mla_reference.explain.checks.errors import actual_output
from paged_mla_reference.explain.checks.examination import (
    Examination,
    Right,
    blinded,
    hold_answer,
    lacking_in,
    unknown_tokens,
)
from paged_mla_reference.explain.checks.finding import Finding, Stage, State
from paged_mla_reference.explain.checks.step import PREFILL
from paged_mla_reference.rules.validation.inputs import validate_prefill
from paged_mla_reference.tolerance.compare import check_output
from paged_mla_shared.errors import InvalidArgument

ANSWER = ("prefill_out", "prefill_lse")
MOST = 1 << 26  # triples of query, key and head: every hypothesis is tried on all of them


def check_prefill(found: Examination) -> None:
    """Check that a prefill's out and lse are within their budgets (S-4 to S-7, S-9, S-21)."""
    step, stage, batch = found.step, Stage.PREFILL, found.step.prefill
    given = [name for name in ANSWER if step.has(name)]
    if batch is None:
        if given:
            detail = lacking_in(step, *PREFILL)
            found.findings.append(Finding.undecided(stage, "out, lse", detail))
        return
    try:
        validate_prefill(step.problem, batch)
    except InvalidArgument as error:
        found.findings.append(Finding(stage, error.argument, State.BROKEN, "S-2", str(error)))
        return
    pairs = int(batch.query_lens.astype(np.int64) @ batch.seq_lens.astype(np.int64))
    detail = "" if given else "the dump has no prefill_out or prefill_lse"
    if pairs * step.problem.dims.num_heads > MOST:
        detail = (
            f"the prefill has more than {MOST} triples of query, key and head: "
            "dump fewer rows or heads"
        )
    if detail:
        found.findings.append(Finding.undecided(stage, "out, lse", detail))
        return
    found.right_prefill = right = Right.of_prefill(step.problem, batch)
    odd = unknown_tokens(found, stage, batch, right.exact)
    exact, rounded = blinded(right.exact, odd), blinded(right.rounded, odd)
    answer = rounded.output(step.problem.dtype)
    hold_answer(
        found,
        stage,
        "prefill_",
        (blinded(actual_output(step, answer, "prefill_"), odd), answer),
        lambda alone: check_output(step.problem, batch, alone, exact, rounded),
    )
