"""The models and schedules that are tried, on any device."""

from __future__ import annotations

import functools

from hf_forms import assert_counts, rows_in
from hf_models import Kind, Size, build, paged
from hf_rounding import Oracle
from hf_schedules import OF_ALIKE, ROWS, SCHEDULES, Trial, requests_of

KINDS = {
    "v2": Kind("v2"),
    "v2-yarn-half": Kind("v2", yarn=True, half=True, heads=3),
    "v2-experts": Kind("v2", experts=True, q_lora=True, block_size=4, form="both"),
    "v3": Kind("v3", q_lora=True, form=None),
    "v3-yarn": Kind("v3", yarn=True, heads=1, block_size=64),
    "v3-materialized": Kind("v3", q_lora=True, form="materialized"),
    "v3-half": Kind("v3", half=True, experts=True, form="both"),
    "v3_neox": Kind("v3_neox", heads=5, block_size=1, form="both"),
    "v3_neox-yarn-half": Kind("v3_neox", yarn=True, half=True, q_lora=True, form="materialized"),
}
CASES = [(kind, schedule) for kind in KINDS for schedule in SCHEDULES]


@functools.cache
def prepared(kind: str, size: Size, *, are_alike: bool):
    """Return a model, requests, the library's logits of each, and the budget."""
    model = build(KINDS[kind], size)
    oracle, requests = Oracle(model), requests_of(size.scale, are_alike=are_alike)
    expected = [oracle.logits(request) for request in requests]
    return model, requests, expected, max(map(oracle.budget, requests))


def assert_case(kind: str, schedule: str, size: Size) -> None:
    """Run one case, and print how much of its budget it took."""
    model, requests, expected, budget = prepared(kind, size, are_alike=schedule in OF_ALIKE)
    block_size, longest = KINDS[kind].block_size, model.config.max_position_embeddings
    ours, pool = paged(model, block_size, num_blocks=2 * ROWS * -(-longest // block_size))
    trial = Trial(ours, pool, requests, expected, size.scale)
    with rows_in(KINDS[kind].form, pool) as counts:
        SCHEDULES[schedule](trial)
    print(f"{kind} {schedule}: {trial.difference:.2e} of {budget:.2e}, {dict(counts)}")
    assert_counts(counts, KINDS[kind].form)
    del trial.cache
    assert pool.num_free == pool.latents.shape[1]
    assert trial.compared > 20
    assert trial.difference <= budget
