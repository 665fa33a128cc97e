"""What the commands conclude from what engines said; the engines are made up here."""

from __future__ import annotations

import pytest

from paged_mla_optimized.engines.sglang.tools import check, rate
from paged_mla_optimized.engines.sglang.tools.engine import ask
from paged_mla_optimized.engines.sglang.tools.scenes import (
    CONTEXT_LEN,
    LONGEST,
    SCENES,
    YARDSTICK,
    prompts,
)
from paged_mla_optimized.engines.tools.report import judge


class Engine:
    """Says token 7, and that 8 is less likely; a request takes `seconds` a token of `clock`."""

    def __init__(self, clock=None):
        self.clock = clock

    def generate(self, *, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        if self.clock is not None:
            self.clock[0] += 0.5 + 0.002 * sampling_params["max_new_tokens"]
            return []
        assert return_logprob
        answers = []
        for prompt, how in zip(input_ids, sampling_params, strict=True):
            count = how["max_new_tokens"]
            meta = {
                "output_token_logprobs": [(-0.1, 7, None)] * count,
                "output_top_logprobs": [[(-0.1, 7, None), (-2.5, 8, None)]] * count,
                "cached_tokens": len(prompt) - 1,
            }
            answers.append({"meta_info": meta})
        assert top_logprobs_num > 1
        return answers


def test_answers_and_hits():
    answers, cached = ask(Engine(), [[1, 2, 3], [4]], [2, 1])
    assert answers == [[(7, {7: -0.1, 8: -2.5})] * 2, [(7, {7: -0.1, 8: -2.5})]]
    assert cached == 2


def test_a_step_is_what_more_tokens_take(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rate.time, "perf_counter", lambda: clock[0])
    assert rate._step_ms(Engine(clock), 2, 16, 2) == pytest.approx([2.0, 2.0])


def a_pass(largest=0.05, gap=0.0625):
    return {"steps": 896, "largest": largest, "median": 0.01, "others": 3, "gap": gap, "equal": 0}


@pytest.mark.parametrize(
    ("ours", "cached", "said"),
    [
        (a_pass(), 99, "as far apart as its own backends, or less"),
        (a_pass(largest=0.07), 99, "beyond: largest 0.0700, the engine's own are 0.0600 apart"),
        (a_pass(gap=0.125), 99, "beyond: gap 0.1250"),
        (a_pass(), 0, "no prefix was hit"),
        (None, 0, "no answer of paged_mla"),
    ],
)
def test_a_scene_is_good_or_says_why_not(capsys, ours, cached, said):
    runs = [{"run": "triton again", "passes": [a_pass(0.06)]}, {"run": "fa3", "error": "Tr\nno"}]
    mine = {"passes": [a_pass(), ours], "cached_tokens": [0, cached]} if ours else {"error": "no"}
    found = {"runs": [*runs, {"run": "paged_mla", **mine}], "own": [a_pass(0.06)]}
    problems = judge({"graphs": found}, "paged_mla", SCENES, check.problem_of)
    assert (problems == {"graphs": ""}) == said.startswith("as")
    assert said in capsys.readouterr().out


def test_scenes_hold_what_they_ask():
    many = prompts()
    assert max(map(len, many)) == LONGEST
    assert LONGEST + 64 < CONTEXT_LEN
    assert sum(map(len, many)) + 64 * len(many) < check._POOL
    for name, scene in SCENES.items():
        assert YARDSTICK in scene.peers, name
        breadth = scene.arguments.get("speculative_ngram_max_bfs_breadth")
        breadth = breadth or scene.arguments.get("speculative_eagle_topk")
        trees = "speculative_algorithm" in scene.arguments and breadth != 1
        assert (scene.page_size == 1) == trees, name  # or SGLang refuses
