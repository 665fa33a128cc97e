"""The models and schedules that are tried, on any device."""

from __future__ import annotations

from hf_models import Kind, Size, build, paged
from hf_rounding import Oracle
from hf_schedules import SCHEDULES, Trial, requests_of

KINDS = {
    "v2": Kind("v2"),
    "v2-yarn-half": Kind("v2", yarn=True, half=True, heads=3),
    "v2-experts": Kind("v2", experts=True, q_lora=True, block_size=4),
    "v3": Kind("v3", q_lora=True),
    "v3-yarn": Kind("v3", yarn=True, heads=1, block_size=64),
    "v3-half": Kind("v3", half=True, experts=True),
    "v3_neox": Kind("v3_neox", heads=5, block_size=1),
    "v3_neox-yarn-half": Kind("v3_neox", yarn=True, half=True, q_lora=True),
}
CASES = [(kind, schedule) for kind in KINDS for schedule in SCHEDULES]


def try_case(kind: str, schedule: str, size: Size, rows: int = 3) -> Trial:
    """Run one case; what it compared and found is in the trial."""
    model = build(KINDS[kind], size)
    ours, pool = paged(model, KINDS[kind].block_size, num_blocks=640 // KINDS[kind].block_size)
    requests = requests_of(schedule, rows, seed=len(schedule))
    trial = Trial(Oracle(model), ours, pool, requests)
    SCHEDULES[schedule](trial)
    del trial.cache
    assert pool.num_free == pool.latents.shape[1]
    return trial
