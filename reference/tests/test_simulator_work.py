"""Limits of the work of a schedule: a small file cannot cause hours of work."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path

import pytest

from paged_mla_reference.rules.parallel import ContextParallel
from paged_mla_reference.simulator import work
from paged_mla_reference.simulator.command import main
from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.generated import generated
from paged_mla_reference.simulator.request import LATEST_STEP, Request
from paged_mla_reference.simulator.scenario import Scenario, drive, load_scenario, save_scenario
from paged_mla_reference.simulator.scenarios import core_scenario
from paged_mla_reference.simulator.step import Step
from paged_mla_reference.simulator.timeline import Timeline
from paged_mla_reference.simulator.trace import record
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.errors import InvalidArgument

MANY_BLOCKS = EngineConfig(num_blocks=1 << 20, block_size=1)


def ask(name: str, prompt: int, output: int, arrival: int = 0, abort: int | None = None) -> Request:
    return Request(name, (1,) * prompt, (2,) * output, arrival, abort=abort)


def scenario_of(*requests: Request, config: EngineConfig = MANY_BLOCKS) -> Scenario:
    return Scenario(name="much", why="it takes long", config=config, requests=requests)


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ((ask("a", 500_000, 500_000),), 0),
        ((ask("a", 1, 1), ask("b", 1, 300_000)), 1),
        (tuple(ask(str(n), 2000, 2000) for n in range(200)), None),
    ],
)
def test_too_much_output_is_refused_before_a_step(requests: tuple[Request, ...], named: int | None):
    """S-19: each token of output is a step that lists all blocks of its request."""
    place = r"requests\[\d+\]" if named is None else rf"requests\[{named}\]"
    with pytest.raises(InvalidArgument, match=f"^{place}: got .* units of work; allowed: at most"):
        scenario_of(*requests)


def test_requests_that_hang_up_may_be_long():
    """S-19: they end before their output does."""
    scenario_of(ask("a", 500_000, 500_000, abort=3))


def test_a_log_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The file, the request, what it costs and what is allowed are named."""
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"arrival": 0, "prompt_len": 500_000, "output_len": 500_000}))
    assert main(["--log", str(log), "--block-size", "1", "--num-blocks", str(1 << 20)]) == 2
    told = capsys.readouterr().err
    assert f"{log}: requests[0]: got 1,000,000 tokens in blocks of 1, 375,008,000,000 units" in told


def test_a_scenario_file(tmp_path: Path):
    """Its requests are counted when it is read."""
    path = tmp_path / "scenario.json"
    save_scenario(core_scenario("chunks"), path)
    fields = json.loads(path.read_text())
    fields["config"] |= {"num_blocks": 1 << 20, "block_size": 1}
    fields["requests"][0]["output"] = [1] * 100_000
    path.write_text(json.dumps(fields))
    with pytest.raises(InvalidArgument, match=r"scenario.json: .*requests\[0\].*units of work"):
        load_scenario(path)


HABITS = {
    "abort": (MANY_BLOCKS, (ask("a", 1000, 1000, abort=900),)),
    "prompt": (EngineConfig(num_blocks=1024, block_size=1, max_chunk=1), (ask("a", 900, 2),)),
    "waiting": (
        EngineConfig(num_blocks=1024, block_size=1, max_rows=1),
        (ask("a", 20, 200), ask("b", 900, 2)),
    ),
    "same-prompt": (
        EngineConfig(num_blocks=2, block_size=1 << 14, token_budget=1 << 15, max_chunk=1 << 15),
        (ask("a", 16_385, 200), ask("b", 16_385, 2, arrival=2)),
    ),
    "many-hang-up": (
        EngineConfig(max_rows=1),
        (ask("a", 1, 300), *(ask(str(n), 1, 1, abort=min(n, 280)) for n in range(2500))),
    ),
    "drafts": (
        EngineConfig(
            num_blocks=1024,
            drafts=Drafts(kind=DraftKind.TREE, depth=8, branches=64, multi_step=True),
        ),
        (ask("a", 20, 200),),
    ),
    "late": (EngineConfig(), (ask("a", 1, 1, arrival=LATEST_STEP),)),
}


@pytest.mark.parametrize(("config", "requests"), HABITS.values(), ids=HABITS)
def test_a_run_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, requests: tuple[Request, ...]
):
    """S-19: what no output foretells is counted step by step."""
    scenario = scenario_of(*requests, config=config)
    monkeypatch.setattr(work, "MOST_WORK", 50_000)
    with pytest.raises(InvalidArgument, match=r"^requests: got .* units of work up to step \d+"):
        for _ in drive(Engine(config), scenario.requests):
            pass


@pytest.mark.parametrize("limit", ["MOST_WORK", "MOST_PRODUCTS"])
def test_nothing_is_written_past_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str
):
    """A schedule is rejected before its page is written, a trace before its first output."""
    monkeypatch.setattr(work, limit, 1000)
    results = [str(tmp_path / name) for name in ("page.html", "saved.json", "trace.npz")]
    options = zip(("--html", "--save", "--trace"), results, strict=True)
    assert main(["prefixes", *(word for option in options for word in option)]) == 2
    assert not list(tmp_path.iterdir())


def test_outputs_cost_by_the_size_of_heads():
    """S-5: a pair of DeepSeek's heads is many more products than one of the small dims."""
    work.check_answers(10_000_000, 1, PRESETS["small"])
    with pytest.raises(InvalidArgument, match=r"^trace: got 10,000,000 pairs of a query and a key"):
        work.check_answers(10_000_000, 1, PRESETS["deepseek-v3"])


def padded_rows(buckets: tuple[int, ...], world: int = 1) -> Scenario:
    config = EngineConfig(buckets=buckets, padded_query_len=1, group=ContextParallel(world))
    return scenario_of(ask("a", 2, 3), config=config)


@pytest.mark.parametrize(
    ("scenario", "dims", "limit", "told"),
    [
        (padded_rows((1 << 16,)), "deepseek-v3", "MOST_NUMBERS", "numbers in step 1"),
        (padded_rows((1 << 10,)), "small", "MOST_NUMBERS", "numbers in step 1"),
        (padded_rows((1,), world=8), "small", "MOST_BATCHES", "batches"),
    ],
    ids=["heads", "padding", "ranks"],
)
def test_padding_and_ranks_of_a_trace_cost_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, scenario, dims, limit, told
):
    """S-19: a step of two tokens may be padded to a million, and is one of each rank."""
    if dims == "small":
        monkeypatch.setattr(work, limit, {"MOST_NUMBERS": 1 << 18, "MOST_BATCHES": 15}[limit])
    path, trace = tmp_path / "scenario.json", tmp_path / "trace.npz"
    save_scenario(scenario, path)
    assert main(["--scenario", str(path), "--trace", str(trace), "--dims", dims]) == 2
    assert told in capsys.readouterr().err
    assert not trace.exists()
    with pytest.raises(InvalidArgument, match=rf"^trace: got [\d,]+ {told}"):
        list(record(scenario, PRESETS[dims], "float32"))


def test_a_page_lists_no_more_blocks_than_a_browser_takes(monkeypatch, tmp_path: Path, capsys):
    """S-19: a request of a million blocks lists them in each of its steps."""
    monkeypatch.setattr(work, "MOST_LISTED", 10)
    page = tmp_path / "page.html"
    assert main(["prefixes", "--html", str(page)]) == 2
    assert "--html: got " in capsys.readouterr().err
    assert not page.exists()
    assert main(["prefixes"]) == 0


@pytest.mark.parametrize("keys", [("a" * 4097,), ("",) * 4097, ("ab", "c" * 4095)])
def test_extra_keys_are_short(keys: tuple[str, ...]):
    """S-13: they are part of the key of every block."""
    with pytest.raises(
        InvalidArgument, match=r"^extra_keys: got \d+ keys, \d+ characters; .* 4096"
    ):
        Request("a", (1,), (1,), extra_keys=keys)
    assert Request("a", (1,), (1,), extra_keys=("a" * 4096,))


def test_a_recording_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch):
    """S-19: a replay of a schedule also computes outputs and raises the error before the step."""
    monkeypatch.setattr(work, "MOST_PRODUCTS", 1_000_000)
    steps = record(core_scenario("prefixes"), PRESETS["small"], "float32")
    next(steps)
    with pytest.raises(InvalidArgument, match=r"^trace: got [\d,]+ pairs of a query and a key"):
        list(steps)


def test_an_idle_step_does_not_look_at_every_block():
    """S-19: a request may come late to an engine of a million blocks, some of them cached."""
    scenario = scenario_of(ask("a", 1000, 1), ask("late", 1, 1, arrival=LATEST_STEP))
    engine = Engine(scenario.config)
    timeline = Timeline(engine)
    began = time.process_time()
    for step in islice(drive(engine, scenario.requests), 5000):
        timeline.watch(step)
    assert time.process_time() - began < 5  # it was 1 s for each 20 steps


@pytest.mark.parametrize("seed", range(12))
def test_a_timeline_has_the_owner_of_each_block(seed: int):
    """S-19: free, cached, or a request's, the first in the order of rows, alone or not."""
    scenario = generated(seed)
    engine = Engine(scenario.config)
    timeline = Timeline(engine)
    states = [0] * scenario.config.num_blocks
    for step in drive(engine, scenario.requests):
        timeline.watch(step)
        page = timeline.as_dict()
        for block, state in page["steps"][-1]["changed"]:
            assert states[block] != state
            states[block] = state
        lanes = [request["id"] for request in page["requests"]]
        assert states == _states(engine, step, lanes)


def _states(engine: Engine, step: Step, lanes: list[str]) -> list[int]:
    pool = engine.pool
    states = [0] * engine.config.num_blocks
    for block in pool.cached:
        states[block] = 1
    users = [(row.request.id, row.blocks) for row in step.rows]
    users += [(seq.request.id, tuple(seq.blocks)) for seq in engine.running]
    for name, blocks in reversed(users):
        for block in blocks:
            if references := pool.references(block):
                states[block] = 2 + 2 * lanes.index(name) + (references > 1)
    return states
