"""The results of the commands for given outputs of engines; the engines are stubs."""

from __future__ import annotations

import json
import math
import os
import sys
from types import SimpleNamespace

import pytest

from paged_mla_optimized.engines.tools.follow import distance, follow
from paged_mla_optimized.engines.tools.history import History, pairs
from paged_mla_optimized.engines.tools.report import judge, page
from paged_mla_optimized.engines.tools.side_by_side import Cell
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools import check, prefill, rate
from paged_mla_optimized.engines.vllm.tools.engine import give_cores_processes
from paged_mla_optimized.engines.vllm.tools.scenes import (
    LONGEST,
    MAX_MODEL_LEN,
    SCENES,
    SCENES_OF_TWO_GPUS,
    prompts,
)


def engine_that_says(thinks):
    """Return a greedy engine and the sizes of its calls; `thinks` maps a past to logprobs."""
    asked = []

    def generate(pasts, tokens):
        asked.append(len(pasts))
        answers = []
        for past, count in zip(pasts, tokens, strict=True):
            answer, known = [], list(past)
            for _ in range(count):
                logprobs = thinks(tuple(known))
                answer.append((max(logprobs, key=logprobs.__getitem__), logprobs))
                known.append(answer[-1][0])
            answers.append(answer)
        return answers

    return generate, asked


def counting(past):
    """Prefer the length of the past."""
    return {len(past): -0.5, 0: -1.0}


def test_a_request_that_differs_generates_again():
    """Every step has the history's past, also behind a step at which engines differ."""

    def stubborn(past):
        return {0: -0.4, len(past): -0.6} if len(past) == 3 else counting(past)

    history = [[1, 2, 3, 4], [2, 3]]
    generate, asked = engine_that_says(stubborn)
    steps = follow(generate, [[9], [9, 9]], history)
    assert asked == [2, 1]  # both part at the past of three, where the second ends
    assert [len(found) for found in steps] == [4, 2]
    plain = follow(engine_that_says(counting)[0], [[9], [9, 9]], history)
    apart = distance(history, plain, steps)
    assert (apart.steps, apart.others, apart.equal) == (6, 2, 4)
    assert apart.largest == pytest.approx(0.1)
    assert apart.gap == pytest.approx(0.5)
    assert apart.median == 0


def test_a_token_that_an_engine_does_not_consider_is_infinitely_far():
    apart = distance([[1]], [[{1: -0.1, 2: -3.0}]], [[{3: -0.1, 2: -0.2}]])
    assert apart.largest == apart.gap == math.inf


@pytest.mark.parametrize("steps", [[0.0, math.nan], [math.nan, 0.0]])
def test_nan_is_infinitely_far(steps):
    """The order of distances does not matter: no comparison with NaN is true."""
    told = [{1: -0.1 + step, 2: -3.0} for step in steps]
    apart = distance([[1, 1]], [[{1: -0.1, 2: -3.0}] * 2], [told])
    assert apart.largest == math.inf


def a_pass(largest=0.05, gap=0.0625):
    return {
        "steps": 896,
        "largest": largest,
        "median": 0.01,
        "others": 3,
        "gap": gap,
        "equal": 0,
    }


def a_scene(ours, own=0.06, **counts):
    mine = {"preemptions": 1, "steps_with_drafts": 5, "cached_tokens": [0, 99]} | counts
    runs = [
        {"run": "TRITON_MLA again", "passes": [a_pass(0.04)]},
        {"run": "FLASHMLA", "passes": [a_pass(), a_pass()]},
        {"run": "CUSTOM", "passes": [a_pass(), ours], **mine},
    ]
    return {"runs": runs, "own": [a_pass(own), a_pass()]}


@pytest.mark.parametrize(
    ("name", "ours", "counts", "said"),
    [
        ("full", a_pass(), {}, "passed: within the distance of other backends"),
        (
            "full",
            a_pass(largest=0.07),
            {},
            "too far: largest 0.0700, the engine's own backends are 0.0600 apart",
        ),
        ("full", a_pass(gap=0.125), {}, "too far: gap 0.1250"),
        ("full", a_pass(), {"cached_tokens": [0, 0]}, "no prefix was hit"),
        ("preemption", a_pass(), {"preemptions": 0}, "no request was preempted"),
        ("ngram", a_pass(), {"steps_with_drafts": 0}, "no drafts were verified"),
    ],
)
def test_a_workload_passes_or_reports_its_problem(capsys, name, ours, counts, said):
    problems = judge({name: a_scene(ours, **counts)}, NAME, SCENES, check.problem_of)
    assert said in capsys.readouterr().out
    assert (problems == {name: ""}) == said.startswith("passed")


@pytest.mark.parametrize(("other", "good"), [("eager", True), ("heads-128", False), ("fp8", False)])
def test_workloads_of_the_same_model_and_cache_set_the_limit(other, good):
    found = {"full": a_scene(a_pass(largest=0.07)), other: a_scene(a_pass(), own=0.08)}
    problems = judge(found, NAME, SCENES, check.problem_of)
    assert (problems["full"] == "") == good


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"runs": [{"run": "CUSTOM", "error": "Traceback\nValueError: no"}]}, "see full.log"),
        ({"error": "ValueError: no"}, "ValueError: no"),
    ],
    ids=["our-engine-fell", "the-process-fell"],
)
def test_a_workload_without_our_result_fails(capsys, found, told):
    problems = judge({"full": found}, NAME, SCENES, check.problem_of)
    assert problems == {"full": f"CUSTOM has no result: {told}"}
    assert "ValueError: no" in capsys.readouterr().out


def test_every_two_passes_of_own_backends_are_compared():
    """The history's own logprobs are one of them."""
    history = History([[9]], [[1]], [[{1: -0.5}]])
    own = {"FLASHMLA": [[[{1: -0.6}]], [[{1: -0.9}]]]}
    found = {(p["first"], p["second"]): round(p["largest"], 3) for p in pairs(history, own)}
    assert found == {
        ("history", "FLASHMLA 0"): 0.1,
        ("history", "FLASHMLA 1"): 0.4,
        ("FLASHMLA 0", "FLASHMLA 1"): 0.3,
    }


def test_a_page_has_every_workload_and_every_problem():
    """A page contains workloads of several runs, each with its commit."""
    facts = {"engine": "vllm 0.25.0", "device": "H200", "torch": "2.11", "triton": "3.6"}
    facts |= {"date": "2026-01-01", "commit": "abc"}
    full = a_scene(a_pass(largest=0.07)) | {"facts": facts, "problem": "too far: largest 0.0700"}
    shown = page({"full": full, "fp8": {"facts": facts, "problem": "no result"}}, NAME)
    assert "vllm 0.25.0, H200, torch 2.11, triton 3.6, 2026-01-01\n" in shown
    assert "| full | 896; 896 | 0.0500; 0.0700 |" in shown
    assert "| 0.0600 | 0.0625 | abc |" in shown
    assert "full: too far: largest 0.0700\nfp8: no result\n" in shown


def test_workloads_fit_their_engines():
    many = prompts()
    assert max(map(len, many)) == LONGEST
    assert max(map(len, many)) + 64 <= MAX_MODEL_LEN
    for name, scene in (SCENES | SCENES_OF_TWO_GPUS).items():
        assert (scene.drafts > 0) == bool(scene.speculation), name
        held = scene.arguments.get("num_gpu_blocks_override", 10**9) * scene.block_size
        assert scene.preempts == (held < sum(map(len, many))), name
        assert held >= MAX_MODEL_LEN  # or vLLM refuses to start


@pytest.mark.parametrize(("ms", "steps"), [(1.0, 160), (20.0, 20), (100.0, 6)])
def test_a_window_is_long_enough_and_no_longer(monkeypatch, ms, steps):
    clock, taken = [0.0], []
    monkeypatch.setattr(rate.time, "perf_counter", lambda: clock[0])

    def step():
        clock[0] += ms / 1e3
        taken.append(1)
        return [None] * 8

    assert rate.window_ms(step, 8) == pytest.approx(ms)
    assert len(taken) == steps


class Core:
    """Steps take 2 ms of a clock and a graph of two kernels, which have half of that.

    As a core in a process of its own it begins with a request that it has, unless it is held.
    """

    def __init__(self, clock, traces):
        self.llm_engine, self.clock, self.traces = self, clock, traces
        self.held, self.left, self.profiled = False, {}, None

    def sleep(self, level, mode):
        assert (level, mode) == (0, "keep")
        self.held = True

    def is_sleeping(self):
        return self.held

    def wake_up(self, tags):
        assert tags == ["scheduling"]
        self.held = False

    def add_request(self, name, prompt, way):
        assert self.held, "the first request would begin alone"
        assert list(prompt) == ["prompt_token_ids"]
        self.left[f"{name}-internal"] = way.max_tokens
        return f"{name}-internal"

    def abort_request(self, names, internal):
        assert internal
        assert set(names) == set(self.left)
        self.left.clear()

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        assert not self.held
        self.clock[0] += 0.002
        said = list(self.left)
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        if self.profiled is not None:
            at, call = 1e6 * self.clock[0], len(self.profiled)
            self.profiled += [
                {"cat": "kernel", "ts": at + half, "dur": 500, "args": {"correlation": call}}
                for half in (0, 1000)
            ]
        return said

    def start_profile(self):
        self.profiled = []

    def stop_profile(self):
        self.traces.mkdir()
        path = self.traces / "rank0.1.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": self.profiled}))


@pytest.fixture
def core(monkeypatch, tmp_path):
    """Return an engine's core with a simulated clock."""
    clock = [0.0]
    monkeypatch.setattr(rate.time, "perf_counter", lambda: clock[0])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return Core(clock, tmp_path / "traces")


def test_rows_of_a_cell_begin_together_and_last_for_all_its_windows(core):
    timer = rate._Timer(core, 1 << 20, core.traces)
    assert timer.step_ms(Cell(8, 16), 4) == pytest.approx([2.0] * 4)
    assert timer.busy_ms(Cell(8, 16)) == pytest.approx(1.0)
    assert not core.left


def test_prompts_begin_together_and_are_timed_to_the_last(core):
    timer = prefill._Timer(core, core.traces)
    assert timer.step_ms(Cell(4, 16), 2) == pytest.approx([2.0] * 2)
    assert timer.busy_ms(Cell(4, 16)) == pytest.approx(1.0)
    assert timer.seconds(Cell(64, 4096)) == math.inf


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_process_with_an_engine_is_not_forked_for_the_next(monkeypatch, at_once):
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROCESSING_METHOD"):
        monkeypatch.setenv(name, "")  # what is set below is taken back
    give_cores_processes(at_once)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert (os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] == "spawn") == (at_once > 1)
