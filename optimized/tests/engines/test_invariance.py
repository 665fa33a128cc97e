"""The results of the command for an engine's logprobs alone and in batches; no engine runs."""

from __future__ import annotations

import argparse
import json
import math
from types import SimpleNamespace

import pytest
import torch

from paged_mla_optimized.engines.sglang.tools import invariance as of_sglang
from paged_mla_optimized.engines.tools import invariance, report
from paged_mla_optimized.engines.tools.invariance import (
    LONGEST,
    MAX_LEN,
    MAX_TOKENS,
    ROWS,
    Scene,
    compared,
    keeps,
    mixes,
    page,
    prompts,
    run_scene,
    told,
)
from paged_mla_optimized.engines.vllm.tools import invariance as of_vllm

MANY = [[5] * length for length in (2, 17, 40)]


def engine(moves=0.0, moved=17, step=1):
    """Return an engine in which a prompt's logprobs change in a batch, from a step on."""

    def ask(asked, tokens):
        answers = []
        for prompt, count in zip(asked, tokens, strict=True):
            shift = moves if len(asked) > 1 and len(prompt) == moved else 0.0
            said = [(9, {9: -0.5 - shift * (at >= step), 8: -2.0}) for at in range(count)]
            answers.append(said)
        return answers, 0

    return ask


def test_equal_logprobs_keep_their_bits():
    found = {"mixes": list(compared(engine(), MANY, 3))}
    assert keeps(found)
    assert told(found) == "together 3 of 3, reversed 3 of 3, half 2 of 2, crowd 6 of 6"


def test_a_changed_bit_is_reported():
    moves = 2.0**-24  # the least that a float32 near 0.5 may move by
    found = {"mixes": list(compared(engine(moves), MANY, 3))}
    assert not keeps(found)
    assert told(found) == (
        "together 2 of 3, reversed 2 of 3, half 2 of 2, crowd 4 of 6; "
        "prompts of 17 tokens differ, from step 1 on, by up to 6e-08 nats"
    )


@pytest.mark.parametrize("told_beside", [{4: -0.1}, {9: math.nan, 8: -2.0}])
def test_logprobs_without_a_distance_are_reported_as_infinite(told_beside):
    """No token is among the most likely ones of both, or a logprob is NaN."""

    def ask(asked, _tokens):
        said = {9: -0.5, 8: -2.0} if len(asked) == 1 else told_beside
        return [[(9, said)] for _ in asked], 0

    found = {"mixes": list(compared(ask, MANY, 1))}
    assert not keeps(found)
    assert told(found).endswith("differ, from step 0 on, by up to inf nats")


def test_a_workload_that_ends_early_fails():
    found = {"mixes": list(compared(engine(), MANY, 3))[:2]}
    assert not keeps(found)
    assert not keeps({"error": "out of time"})
    assert told({"error": "out of time"}) == "failed: out of time"


def test_results_of_a_workload_are_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(invariance, "build_model", lambda folder, **_: folder)

    def run(model, scene, use):
        assert model == tmp_path
        use(engine())
        raise RuntimeError(f"{scene.backend} fell\nand more")

    run_scene(Scene(backend="ours"), tmp_path, "ours", 2, run)
    found = json.loads((tmp_path / "ours.json").read_text())
    assert keeps(found)
    assert told(found).endswith("; failed: RuntimeError: ours fell")


def test_prompts_and_mixes_fill_an_engine():
    many = prompts()
    assert max(map(len, many)) == LONGEST
    assert min(map(len, many)) == 2
    assert LONGEST + 192 <= MAX_LEN <= MAX_TOKENS
    found = mixes(len(many))
    assert len(found["together"]) <= ROWS < len(found["crowd"])


@pytest.mark.parametrize("command", [of_vllm.COMMAND, of_sglang.COMMAND])
def test_only_our_backend_in_the_mode_is_required_to_keep_bits(command):
    for scene in command.scenes.values():
        ours = scene.backend == command.scenes["ours"].backend
        assert not scene.is_promised or (ours and scene.is_on)


def test_a_command_runs_workloads_and_reports_failures(tmp_path, monkeypatch, capsys):
    """A page contains the results of several runs."""
    facts = {"engine": "vllm 0.25.0", "device": "H200", "torch": "2.11", "triton": "3.6"}
    monkeypatch.setattr(report, "_facts", lambda _: facts | {"date": "2026-01-01", "commit": "abc"})
    monkeypatch.setattr(invariance, "build_model", lambda folder, **_: folder)
    names = ["ours", "TRITON_MLA", "ours-off"]
    options = argparse.Namespace(here=False, scenes=names, folder=tmp_path, out=tmp_path / "page")
    monkeypatch.setattr(invariance, "options_of", lambda *_, **__: options)
    said = [
        {"tokens": 3, "mixes": list(compared(engine(moves), MANY, 3))} for moves in (0, 0.1, 0.1)
    ]
    monkeypatch.setattr(invariance, "run_scenes", lambda *_: iter(said))
    assert of_vllm.COMMAND.main("", of_vllm.run) == 0
    assert "not batch-invariant as required: none" in capsys.readouterr().out
    said[0] = {"error": "ImportError: no FA3"}
    options.scenes, said = ["ours"], said[:1]
    assert of_vllm.COMMAND.main("", of_vllm.run) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ours: failed: ImportError: no FA3",
        "not batch-invariant as required: ours",
    ]
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert lines[0] == "vllm 0.25.0, H200, torch 2.11, triton 3.6, 2026-01-01"
    assert lines[-1].startswith("| ours-off | off | 3 | together 2 of 3, reversed 2 of 3")
    assert "| ours | on | - | failed: ImportError: no FA3 | - | abc |" in lines
    assert page(json.loads((tmp_path / "page.json").read_text())).splitlines() == lines


def test_norms_are_launched_for_few_tokens_at_a_time():
    """Sums and outputs are written in place, as by vLLM's own kernel."""
    launches = []

    def norm(tokens, residual, weight, epsilon):
        launches.append(len(tokens))
        residual += tokens
        tokens.copy_(residual * weight + epsilon)

    ops = SimpleNamespace(fused_add_rms_norm=norm)
    of_vllm.launch_norms_in_parts(ops)
    tokens, residual = torch.arange(1200.0).view(600, 2), torch.ones(600, 2)
    weight = torch.tensor([2.0, 3.0])
    expected = (tokens + 1) * weight + 0.5
    ops.fused_add_rms_norm(tokens, residual, weight, 0.5)
    assert launches == [255, 255, 90]
    assert torch.equal(tokens, expected)
    assert torch.equal(residual, torch.arange(1200.0).view(600, 2) + 1)
