"""Schedules: what runs in which step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator_runs import TINY, ask, check_answers, run, words

from paged_mla_reference.rules.parallel import ContextParallel
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig, RowOrder
from paged_mla_reference.simulator.coverage import Coverage, Situation
from paged_mla_reference.simulator.dense import Dense
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.generated import generated
from paged_mla_reference.simulator.model import Histories, ModelStandIn
from paged_mla_reference.simulator.request import LATEST_STEP
from paged_mla_reference.simulator.scenario import drive, load_scenario, save_scenario
from paged_mla_reference.simulator.scenarios import CORE
from paged_mla_reference.simulator.step import Kind
from paged_mla_reference.simulator.trace import record
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask

PLAIN = EngineConfig(block_size=4, num_blocks=30, token_budget=8, max_chunk=5)


def shape(steps, of=None):
    """Return each step's rows as (kind, committed, query tokens), of one request or of all."""
    return [
        [(str(row.kind), row.committed, row.query_len) for row in step.rows
         if of in (None, row.request.id)]
        for step in steps
    ]  # fmt: skip


def test_a_prompt_in_chunks():
    """S-2: 11 tokens in pieces of at most 5, the last of 1; then one token per step."""
    _, steps = run(PLAIN, [ask("a", 11, 3)])
    assert shape(steps) == [
        [("prefill", 0, 5)],
        [("prefill", 5, 5)],
        [("prefill", 10, 1)],
        [("decode", 11, 1)],
        [("decode", 12, 1)],
    ]


def test_the_budget_is_shared():
    """S-2: running rows first, then what is left of 8 tokens; order of arrival counts."""
    _, steps = run(PLAIN, [ask("a", 5, 3), ask("b", 9, 1)])
    assert shape(steps[:3]) == [
        [("prefill", 0, 5), ("prefill", 0, 3)],
        [("decode", 5, 1), ("prefill", 3, 5)],
        [("decode", 6, 1), ("prefill", 8, 1)],
    ]


@pytest.mark.parametrize(
    ("order", "kinds"),
    [
        (RowOrder.DECODE_FIRST, ["decode", "prefill", "prefill"]),
        (RowOrder.AS_ARRIVED, ["prefill", "decode", "prefill"]),
        (RowOrder.INTERLEAVED, ["prefill", "decode", "prefill"]),
    ],
)
def test_row_orders(order: RowOrder, kinds: list[str]):
    """S-19: the same rows in every order engines use."""
    config = replace(PLAIN, order=order, token_budget=20)
    _, steps = run(config, [ask("long", 12, 1), ask("short", 1, 9), ask("new", 3, 1, 1)])
    assert [str(row.kind) for row in steps[1].rows] == kinds


def test_a_hit_starts_behind_shared_blocks():
    """S-13: of a known prompt of 8 tokens 4 are taken over and 4 computed again."""
    prompt = words("p", 8)
    engine, steps = run(PLAIN, [ask("a", prompt), ask("b", prompt, arrival=3)])
    assert shape(steps, of="b")[-1] == [("prefill", 4, 4)]
    assert (engine.hit_tokens, engine.prompt_tokens) == (4, 16)
    first = next(step.rows[0] for step in steps if step.rows)
    assert steps[-1].rows[0].blocks[0] == first.blocks[0]
    assert engine.coverage[Situation.FULL_PROMPT_HIT] == 1


def test_preemption_computes_again():
    """S-19: the last admitted request is preempted and resumed with all its sampled tokens."""
    config = EngineConfig(block_size=2, num_blocks=8, token_budget=16)
    engine, steps = run(config, [ask("a", 6, 8), ask("b", 6, 4)])
    assert engine.coverage[Situation.PREEMPTED] == 1
    rows = [row for step in steps for row in step.rows if row.request.id == "b"]
    [_, resumed] = [row for row in rows if row.kind is Kind.PREFILL]
    assert resumed.committed + resumed.query_len > 6  # tokens of its output, too


def test_aborts():
    """S-9: a client that hangs up leaves no block behind, running or waiting."""
    config = replace(PLAIN, max_rows=1)
    requests = [replace(ask("a", 5, 20), abort=4), replace(ask("b", 5), abort=2), ask("c", 3)]
    engine, steps = run(config, requests)
    assert engine.coverage[Situation.ABORTED_RUNNING] == 1
    assert engine.coverage[Situation.ABORTED_WAITING] == 1
    assert {row.request.id for step in steps for row in step.rows} == {"a", "c"}


def test_padding_to_graphs():
    """S-6, S-17: rows and tokens up to the bucket; steps with a prefill run as they are."""
    drafts = Drafts(kind=DraftKind.CHAIN, depth=2)
    config = EngineConfig(block_size=4, drafts=drafts, buckets=(4, 8), padded_query_len=1)
    _, steps = run(config, [ask("a", 3, 9), ask("b", 3, 9)])
    assert (steps[0].num_rows, steps[0].num_tokens) == (2, 6)
    assert all((s.num_rows, s.num_tokens) == (4, 12) for s in steps[1:])


def test_idle_steps_have_padded_rows_only():
    """S-6: an engine with nothing to do still runs its smallest graph."""
    config = replace(PLAIN, buckets=(2, 4))
    _, steps = run(config, [ask("a", 3, 1, arrival=2)])
    assert [(len(s.rows), s.num_rows, s.num_tokens) for s in steps[:2]] == [(0, 2, 2)] * 2


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (ask("a", 4, 1), "distinct ids"),
        (ask("b", 200, 1), "at most"),
    ],
    ids=["same-id", "too-long"],
)
def test_requests_that_cannot_run(request_, match: str):
    """S-2: refused on arrival, not in the middle."""
    engine = Engine(PLAIN)
    engine.submit(ask("a", 4, 1))
    with pytest.raises(InvalidArgument, match=match):
        engine.submit(request_)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"prompt": ()}, "prompt"),
        ({"output": ()}, "output"),
        ({"prompt": (4, -1)}, "prompt"),
        ({"arrival": -1}, "arrival"),
        ({"arrival": LATEST_STEP + 1}, "arrival"),
        ({"arrival": 5, "abort": 4}, "abort"),
        ({"abort": LATEST_STEP + 1}, "abort"),
    ],
    ids=[
        *("no-prompt", "no-output", "negative-token", "before-the-start", "too-late"),
        *("hangs-up-before-it-calls", "hangs-up-too-late"),
    ],
)
def test_requests_that_cannot_be(changes, argument: str):
    """S-2: an illegal request raises an error before an engine gets it."""
    with pytest.raises(InvalidArgument, match=argument):
        replace(ask("a", 4, 1), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"buckets": (4, 2)},
        {"padded_query_len": 2},
        {"group": ContextParallel(2, 3)},
        {"drafts": Drafts(kind=DraftKind.CHAIN, depth=0)},
        {"drafts": Drafts(kind=DraftKind.CHAIN, depth=2, branches=2)},
        {"drafts": Drafts(kind=DraftKind.CHAIN, depth=8)},
        {"drafts": Drafts(kind=DraftKind.TREE, depth=1, branches=65)},
        {"drafts": Drafts(kind=DraftKind.CHAIN, depth=1, acceptance=1.5)},
        {"num_blocks": 10**9},
        {"max_rows": 10**9},
        {"buckets": (1, 10**9)},
        {"drafts": Drafts(kind=DraftKind.TREE, depth=1), "group": ContextParallel(2)},
    ],
    ids=str,
)
def test_engines_that_cannot_run(changes):
    """S-18: refused when configured."""
    with pytest.raises(InvalidArgument):
        replace(PLAIN, **changes)


@pytest.mark.parametrize("world", [0, 1025])
def test_groups_that_cannot_be(world):
    """S-18: a group has 1 to 1024 ranks."""
    with pytest.raises(InvalidArgument, match="world"):
        ContextParallel(world)


@pytest.mark.parametrize("scenario", CORE, ids=lambda scenario: scenario.name)
def test_core_scenarios(scenario):
    """S-19: paged attention over the schedule gives the dense outputs."""
    run(scenario.config, scenario.requests)
    assert check_answers(replace(scenario, rope=None)) > 8


def test_core_scenarios_reach_everything():
    """S-19: no situation of the coverage table is missing."""
    coverage = Coverage()
    for scenario in CORE:
        engine, _ = run(scenario.config, scenario.requests)
        coverage.add(engine.coverage)
    assert coverage.missing == []


@pytest.mark.parametrize("seed", range(40))
def test_generated_schedules(seed: int):
    """S-1, S-19: random engines under random traffic pass the audit; some are attended too."""
    scenario = generated(seed)
    run(scenario.config, scenario.requests)
    if seed < 8:
        assert check_answers(replace(scenario, rope=None)) > 0


def test_capacities_hold():
    """S-17: no step of any schedule exceeds the rows and tokens its problem states."""
    for seed in range(60):
        scenario = generated(seed)
        config = scenario.config
        for step in drive(Engine(config), scenario.requests):
            assert step.num_rows <= config.max_step_rows
            assert step.num_tokens <= config.max_step_tokens


def test_a_scenario_survives_its_file(tmp_path):
    """S-19: a schedule of any source is reproduced from its file."""
    for scenario in (*CORE, *map(generated, range(20))):
        save_scenario(scenario, tmp_path / "scenario.json")
        assert load_scenario(tmp_path / "scenario.json") == scenario


def test_an_unknown_version_is_refused(tmp_path):
    """S-19: a file of another version is no guess."""
    path = tmp_path / "scenario.json"
    save_scenario(CORE[0], path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(InvalidArgument, match="version"):
        load_scenario(path)


def test_ranks_make_the_whole():
    """S-8, S-18: exact partial results of all ranks merge to the undivided dense output."""
    divided = next(scenario for scenario in CORE if scenario.config.group.world > 1)
    steps = list(record(divided, TINY, "float32"))
    for left, right in zip(steps[::2], steps[1::2], strict=True):
        lses = np.stack([left.exact.lse, right.exact.lse])
        with np.errstate(invalid="ignore"):
            weights = np.nan_to_num(np.exp(lses - np.logaddexp.reduce(lses, axis=0)))
        merged = weights[0, ..., None] * left.exact.out + weights[1, ..., None] * right.exact.out
        whole = _undivided(divided, left.number)
        np.testing.assert_allclose(merged[: len(whole)], whole, atol=1e-12)


def _undivided(scenario, number: int):
    """Return the dense outputs of one step over all keys."""
    steps = list(drive(Engine(scenario.config), scenario.requests))
    problem = scenario.problem(TINY, "float32", Mask.CAUSAL)
    dense = Dense(problem, ModelStandIn(TINY, "float32"), Histories())
    step = steps[number]
    return dense.answer(step.rows, step.query_tokens, Rounding.EXACT).out
