"""Small engines run to the end, with the audit or through the rules of attention."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_reference.simulator import batches
from paged_mla_reference.simulator.audit import Audit
from paged_mla_reference.simulator.config import EngineConfig
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.scenario import Scenario, drive
from paged_mla_reference.simulator.step import Step
from paged_mla_reference.simulator.trace import record, trace_of
from paged_mla_reference.simulator.workloads import tokens
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.poison import poisoned_image
from paged_mla_shared.problem import Mask

TINY = MlaDims(num_heads=2, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4)


def words(name: str, count: int) -> tuple[int, ...]:
    """Return `count` tokens that belong to `name`."""
    return tokens(random.Random(name), count)


def ask(name: str, prompt: int | tuple[int, ...], output: int = 1, arrival: int = 0) -> Request:
    """Return a request; a prompt given as a number is that many tokens of its own."""
    if isinstance(prompt, int):
        prompt = words(name, prompt)
    return Request(name, prompt, words(f"{name} output", output), arrival)


def run(config: EngineConfig, requests: Sequence[Request]) -> tuple[Engine, list[Step]]:
    """Run to the end under the audit; return the engine and its steps."""
    engine = Engine(config)
    audit = Audit(engine)
    steps = []
    for step in drive(engine, requests):
        audit.check_step(step, batches.lay_out(step.rows))
        steps.append(step)
        assert step.number < 2000, "the engine makes no progress"
    audit.check_end({request.id for request in requests if request.abort is not None})
    return engine, steps


def check_answers(scenario: Scenario) -> int:
    """Compare every step of a trace with exact paged attention; return how many there were."""
    trace = trace_of(scenario, TINY, "float32")
    images = [poisoned_image(trace.problems[Mask.CAUSAL].layout)] * trace.world
    count = 0
    for step in record(scenario, TINY, "float32"):
        problem = trace.problems[step.mask]
        validate_batch(problem, step.batch)
        images[step.rank] = append(problem, step.batch, images[step.rank])
        answer = attend(problem, step.batch, images[step.rank], Rounding.EXACT)
        np.testing.assert_allclose(answer.out, step.exact.out, atol=1e-12)
        np.testing.assert_allclose(answer.lse, step.exact.lse, atol=1e-12)
        count += 1
    return count
