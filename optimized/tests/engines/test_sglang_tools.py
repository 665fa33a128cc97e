"""The results of the commands for given outputs of engines; the engines are stubs."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools import answer, check, rate
from paged_mla_optimized.engines.sglang.tools.engine import arguments, ask, run_engine
from paged_mla_optimized.engines.sglang.tools.scenes import (
    CONTEXT_LEN,
    EVERY_SCENE,
    LONGEST,
    SCENES,
    YARDSTICK,
    prompts,
)
from paged_mla_optimized.engines.tools import model as models
from paged_mla_optimized.engines.tools import report
from paged_mla_optimized.engines.tools.history import History
from paged_mla_optimized.engines.tools.report import judge
from paged_mla_optimized.engines.tools.side_by_side import Cell


class Engine:
    """An engine that generates token 7, with 8 as less likely.

    A step takes `ms` of `clock`, and each row starts `apart` steps after the previous one.
    """

    def __init__(self, clock=None, ms=2.0, apart=3):
        self.clock, self.ms, self.apart = clock, ms, apart
        self.asked = []
        self.step, self.profiled, self.running = 0, None, 0.0

    def start_profile(self, *, output_dir, num_steps, activities, with_stack, record_shapes):
        assert activities == ["GPU"]
        assert not with_stack
        assert not record_shapes
        self.profiled = Path(output_dir), self.step + num_steps

    def generate(self, *, input_ids, sampling_params, stream=False, **more):
        self.asked.append((len(input_ids), len(input_ids[0]), stream))
        if self.clock is None:
            return self.answers(input_ids, sampling_params, **more)
        if not stream:
            self.clock[0] += 0.001 * len(input_ids)
            return []
        return self.chunks(len(input_ids), sampling_params)

    def chunks(self, rows, how):
        most, every = how["max_new_tokens"], how["stream_interval"]
        for step in range(1, most + self.apart * rows):
            self.clock[0] += self.ms / 1e3
            self.step = step
            self.running = sum(0 < step - self.apart * row <= most for row in range(rows)) / rows
            if self.profiled and step > self.profiled[1]:
                self.write_trace()
            for row in range(rows):
                tokens = step - self.apart * row
                if tokens == most or (0 < tokens < most and tokens % every == 1):
                    yield {"index": row, "meta_info": {"completion_tokens": tokens}}

    def write_trace(self):
        """Write what a step does with a graph of two kernels: 0.5 ms of its `ms` with all rows."""
        folder, self.profiled = self.profiled[0], None
        kernels = [
            {
                "cat": "kernel",
                "ts": 1e3 * self.ms * step + half,
                "dur": 250 * self.running,
                "args": {"correlation": step},
            }
            for step in range(5)
            for half in (0, 500)
        ]
        folder.mkdir(exist_ok=True)
        data = json.dumps({"traceEvents": kernels}).encode()
        (folder / "0-TP-0.trace.json.gz").write_bytes(gzip.compress(data))

    def answers(self, input_ids, sampling_params, *, return_logprob, top_logprobs_num):
        assert return_logprob
        assert top_logprobs_num > 1
        return [
            {
                "meta_info": {
                    "output_token_logprobs": [(-0.1, 7, None)] * how["max_new_tokens"],
                    "output_top_logprobs": [[(-0.1, 7, None), (-2.5, 8, None)]]
                    * how["max_new_tokens"],
                    "cached_tokens": len(prompt) - 1,
                    "num_retractions": len(prompt) // 3,
                }
            }
            for prompt, how in zip(input_ids, sampling_params, strict=True)
        ]


def test_tokens_and_hits():
    answers, cached = ask(Engine(), [[1, 2, 3], [4]], [2, 1])
    assert answers == [[(7, {7: -0.1, 8: -2.5})] * 2, [(7, {7: -0.1, 8: -2.5})]]
    assert cached == 2


def test_retractions_are_counted():
    counts = Counter()
    for asked, tokens in (([[1, 2, 3], [4]], [2, 1]), ([[1] * 6], [1])):
        ask(Engine(), asked, tokens, counts)
    assert counts == {"retractions": 3}


@pytest.mark.parametrize(
    ("name", "cached", "retractions", "said"),
    [
        ("retraction", 9, 0, "no row was retracted"),
        ("retraction", 9, 2, ""),
        ("graphs", 9, 0, ""),
        ("graphs", 0, 0, "no prefix was hit"),
    ],
)
def test_a_run_must_exercise_its_workload(name, cached, retractions, said):
    ours = {"cached_tokens": [0, cached], "retractions": retractions}
    assert check.problem_of(SCENES[name], ours) == said
    assert bool(SCENES[name].environment) == (name == "retraction")
    assert not SCENES[name].plain.environment


@pytest.fixture
def timer(monkeypatch):
    """Return what makes a timer over an engine of a clock."""
    clock = [0.0]
    monkeypatch.setattr(rate.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(rate.time, "monotonic", lambda: clock[0])

    def make(contexts=(16, 64, 256), traces=None, **how):
        options = argparse.Namespace(layers=2, heads=4, contexts=contexts)
        return rate._Timer(Engine(clock, **how), options, 4096, traces)

    return make


def test_windows_of_rows_that_began_apart(timer):
    assert timer(ms=2.0).step_ms(Cell(4, 64), 3) == pytest.approx([2.0] * 3)


def test_rows_far_apart_are_given_more_tokens(timer):
    made = timer(ms=100.0, apart=20)  # the first is done before the last begins, at first
    assert made.step_ms(Cell(4, 16), 2) == pytest.approx([100.0] * 2)
    with pytest.raises(RuntimeError, match="a row finished before all windows"):
        timer(ms=100.0, apart=200).step_ms(Cell(4, 16), 2)


def test_a_moment_that_is_missing_is_not_guessed():
    assert rate.windows_ms([{1: 0.0, 7: 1.0, 13: 2.0}], 6, 1) == pytest.approx([1e3 / 6])
    assert rate.windows_ms([{1: 0.0, 13: 2.0}], 6, 1) == []


def test_the_gpu_is_busy_for_a_part_of_a_step(timer, tmp_path):
    made = timer(traces=tmp_path / "traces")
    for cell in (Cell(4, 64), Cell(1, 16)):
        assert made.busy_ms(cell) == pytest.approx(0.5)


@pytest.mark.parametrize("apart", [10, 30])
def test_a_step_of_fewer_rows_is_not_taken_for_one_of_all(timer, tmp_path, apart):
    made = timer(traces=tmp_path / "traces", apart=apart)
    assert made.busy_ms(Cell(8, 64)) == pytest.approx(0.5)


def test_rows_too_far_apart_are_not_profiled(timer, tmp_path):
    made = timer(traces=tmp_path / "traces", apart=100)
    with pytest.raises(RuntimeError, match="8x64: a row finished before enough steps"):
        made.busy_ms(Cell(8, 64))


def test_prompts_are_cached_once(timer):
    made = timer()
    made.step_ms(Cell(2, 256), 1)
    made.step_ms(Cell(2, 64), 1)
    cached = [(rows, length) for rows, length, streams in made.engine.asked if not streams]
    assert cached == [(1, 16), (1, 256), (2, 256)]
    longer, shorter = rate.prompts_of(Cell(2, 256)), rate.prompts_of(Cell(2, 64))
    assert [row[:64] for row in longer] == shorter
    assert longer[0][0] != longer[1][0]


@pytest.mark.parametrize("backend", rate.COMMAND.peers)
def test_prompts_of_others_are_the_default_ones(backend):
    given = arguments(Path("model"), backend, "graphs", **rate.prompts_by_default(backend))
    assert (given["attention_backend"], given["decode_attention_backend"]) == ("fa3", backend)
    assert rate.prompts_by_default(rate.COMMAND.ours) == {}


def test_the_expected_time_of_a_cell_covers_its_prompts(timer):
    made = timer(contexts=[256])  # 1 ms
    cached = made.seconds(Cell(1, 256))
    assert made.seconds(Cell(3, 256)) == pytest.approx(cached + 2 * 0.001)
    assert made.seconds(Cell(16, 256)) == math.inf


def a_pass(largest=0.05, gap=0.0625):
    return {"steps": 896, "largest": largest, "median": 0.01, "others": 3, "gap": gap, "equal": 0}


def a_scene(largest, own, *, answered=True):
    fa3 = {"passes": [a_pass()]} if answered else {"error": "Tr\nno"}
    runs = [{"run": "triton again", "passes": [a_pass()]}, {"run": "fa3"} | fa3]
    mine = {"run": "paged_mla", "passes": [a_pass(largest)], "cached_tokens": [0, 9]}
    return {"runs": [*runs, mine], "own": [a_pass(own)]}


def test_a_workload_is_compared_with_backends_that_have_results():
    """Two passes of only the reference backend do not count; other workloads and runs do."""
    silent, beside = a_scene(0.05, 0.09, answered=False), a_scene(0.05, 0.06)
    assert "no backend of the engine itself" in problems_of({"chain": silent})["chain"]
    assert problems_of({"chain": silent, "eager": beside}) == {"chain": "", "eager": ""}
    assert problems_of({"chain": silent}, {"eager": beside, "of-old": beside}) == {"chain": ""}
    assert problems_of({"chain": a_scene(0.07, 0.06)}, {"heads-128": a_scene(0.1, 0.1)})["chain"]


def problems_of(results, earlier=None):
    return judge(results, "paged_mla", SCENES, check.problem_of, earlier)


def test_workloads_of_an_earlier_run_on_the_same_device_count(monkeypatch, tmp_path):
    facts = {"device": "H200", "torch": "2", "triton": "3", "date": "today", "commit": "a"}
    monkeypatch.setattr(report, "version", lambda _: "0.5.17")
    stem = tmp_path / "sglang.v2"
    assert report.read(stem, "sglang") == report.read(None, "sglang") == {}
    for device, commit, names in (("H100", "a", ["eager"]), ("H200", "b", ["graphs", "tree"])):
        now = facts | {"device": device, "commit": commit}
        monkeypatch.setattr(report, "device_record", lambda now=now: now)
        results = {name: a_scene(0.05, 0.06) for name in names}
        report.write(stem, "sglang", "paged_mla", results, dict.fromkeys(names, ""))
    assert set(report.read(stem, "sglang")) == {"graphs", "tree"}
    assert {path.name for path in tmp_path.iterdir()} == {"sglang.v2.json", "sglang.v2.md"}
    kept = json.loads((tmp_path / "sglang.v2.json").read_text())
    assert {name: scene["facts"]["commit"] for name, scene in kept.items()} == {
        "eager": "a",
        "graphs": "b",
        "tree": "b",
    }


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Replace processes by engines with equal logprobs in all steps; that of fa3 fails."""
    asked, tokens = [], []

    def run_apart(_module, stem, folder, options, _deadline):
        given = dict(zip(options[::2], options[1::2], strict=True))
        asked.append(stem)
        if "--tokens" in given:
            tokens.append(int(given["--tokens"]))
        if stem in broken or given.get("--backend") == "fa3":
            return {"error": "ImportError: no FA3"}
        steps = [[{7: -0.1, 8: -2.5}] * 2]
        history = History([[1]], [[7, 7]], steps)
        begins = "--backend" not in given
        found = (history, [steps]) if begins else [steps, steps]
        (folder / f"{stem}.pickle").write_bytes(pickle.dumps(found))
        run = {"passes": [a_pass()], "cached_tokens": [0, 9]}
        return run | {"run": "triton again" if begins else given["--backend"]}

    broken: list[str] = []
    monkeypatch.setattr(check, "run_apart", run_apart)
    options = argparse.Namespace(folder=tmp_path, seconds=60, tokens=2, jobs=1)
    return SimpleNamespace(asked=asked, tokens=tokens, broken=broken, options=options)


def test_workloads_of_one_model_share_a_history_and_our_backend_runs_first(engines):
    found = check.ask(["graphs", "eager", "page-16", "fp8"], engines.options)
    assert engines.asked[:2] == ["history-h16-auto", "history-h16-fp8_e4m3"]
    ours = ["graphs-paged_mla", "eager-paged_mla", "page-16-paged_mla", "fp8-paged_mla"]
    assert engines.asked[2:6] == ours
    assert engines.asked[6:8] == ["graphs-fa3", "fp8-fa3"]
    others = ["graphs-triton", "graphs-flashmla", "eager-fa3", "page-16-fa3", "fp8-triton"]
    assert engines.asked[8:] == others
    assert list(found) == ["graphs", "eager", "page-16", "fp8"]


@pytest.mark.parametrize(
    ("scene", "asked", "told"), [("graphs", 2, 2), ("heads-128", 2, 256), ("heads-128", 300, 300)]
)
def test_workloads_may_need_more_steps_than_the_option(engines, scene, asked, told):
    """The most of few steps is chance."""
    engines.options.tokens = asked
    check.ask([scene], engines.options)
    assert engines.tokens == [told]


def test_an_engine_that_ends_its_process_leaves_the_others(engines):
    runs = {run["run"]: run for run in check.ask(["graphs"], engines.options)["graphs"]["runs"]}
    assert list(runs) == ["triton again", "paged_mla", "fa3", "triton", "flashmla"]
    assert runs["fa3"] == {"run": "fa3", "error": "ImportError: no FA3"}
    assert "error" not in runs["flashmla"]
    written = json.loads((engines.options.folder / "graphs.json").read_text())
    names = {pair[side].split()[0] for pair in written["own"] for side in ("first", "second")}
    assert names == {"history", "triton", "flashmla"}


def test_without_a_history_no_engine_runs_or_waits(engines, capsys):
    engines.broken.append("history-h16-auto")
    stale = engines.options.folder / "history-h16-auto.pickle"
    stale.write_bytes(pickle.dumps("of an earlier run"))
    found = check.ask(["graphs"], engines.options)
    assert engines.asked == ["history-h16-auto"]
    assert judge(found, "paged_mla", SCENES, check.problem_of)["graphs"]
    assert "ImportError: no FA3" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"history-h16-auto\.log"):
        answer.wait_for(stale)


def test_a_history_is_waited_for(tmp_path):
    path = tmp_path / "history.pickle"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(answer.wait_for, path)
        answer.give(path, pickle.dumps([7]))
        assert waiting.result(timeout=5) == [7]


@pytest.mark.parametrize("option", ["attention_backend", "decode_attention_backend"])
def test_without_an_entry_point_no_engine_is_made(monkeypatch, option):
    monkeypatch.setattr(f"{run_engine.__module__}.entry_points", lambda **_: ())
    with pytest.raises(RuntimeError, match=r"no entry point 'paged_mla' .*install"):
        run_engine({option: NAME}, pytest.fail)


def test_flashmla_runs_only_decode_rows(tmp_path):
    """Its prompts would go to kernels that FlashInfer compiles."""
    found = arguments(tmp_path, "flashmla", "graphs")
    assert (found["attention_backend"], found["decode_attention_backend"]) == ("fa3", "flashmla")
    assert "decode_attention_backend" not in arguments(tmp_path, "fa3", "graphs")


def test_a_draft_model_is_a_v2(tmp_path, monkeypatch):
    """SGLang takes a V3 that drafts for its layers of further tokens alone."""
    monkeypatch.setattr(models, "build_model", lambda folder, family="v3", **_: folder / family)
    assert answer.given(SCENES["draft-model"], "fa3", tmp_path)[
        "speculative_draft_model_path"
    ].endswith("v2")
    assert "speculative_draft_model_path" not in answer.given(SCENES["chain"], "fa3", tmp_path)


def test_workloads_fit_their_engines():
    many = prompts()
    assert max(map(len, many)) == LONGEST
    assert LONGEST + 64 < CONTEXT_LEN
    assert sum(map(len, many)) + 64 * len(many) < answer.POOL
    for name, scene in EVERY_SCENE.items():
        model = scene.heads, scene.kv_cache_dtype
        alike = [s for s in SCENES.values() if (s.heads, s.kv_cache_dtype) == model]
        assert {peer for s in alike for peer in s.peers} > {YARDSTICK}, name
        breadth = scene.arguments.get("speculative_ngram_max_bfs_breadth")
        breadth = breadth or scene.arguments.get("speculative_eagle_topk")
        trees = "speculative_algorithm" in scene.arguments and breadth != 1
        assert (scene.page_size == 1) == trees, name  # or SGLang refuses
