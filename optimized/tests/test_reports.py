"""Committed pages of figures are what the commands generate from the numbers next to them."""

import json
from functools import partial
from pathlib import Path

import pytest

from paged_mla_optimized.engines.sglang.registration import NAME as SGLANG
from paged_mla_optimized.engines.sglang.tools import rate as sglang_rate
from paged_mla_optimized.engines.tools import invariance
from paged_mla_optimized.engines.tools import report as scenes
from paged_mla_optimized.engines.vllm.registration import NAME as VLLM
from paged_mla_optimized.engines.vllm.tools import prefill as vllm_prefill
from paged_mla_optimized.engines.vllm.tools import rate as vllm_rate
from paged_mla_optimized.tools.bench import (
    accuracy,
    append,
    formats,
    fp8,
    instances,
    layer,
    lengths,
    parallel,
    prefill,
)
from paged_mla_optimized.tools.bench.report import write

REPORTS = Path(__file__).parents[1] / "bench" / "reports"
TABLES = {
    "accuracy": accuracy,
    "append": append,
    "formats": formats,
    "fp8": fp8,
    "h100-fp8": fp8,
    "h100-formats": formats,
    "instances": instances,
    "instances-long": instances,
    "h100-instances": instances,
    "h100-instances-long": instances,
    "layer": layer,
    "lengths": lengths,
    "parallel": parallel,
    "h100-parallel": parallel,
    "prefill": prefill,
}
PEERS = {
    "h100": ["flashmla", "fa3", "vllm_triton", "sglang_triton"],
    "h200": ["flashmla", "fa3", "vllm_triton", "sglang_triton"],
    "h200-flashinfer": ["flashmla", "fa3", "flashinfer", "vllm_triton", "sglang_triton"],
}
RATES = {
    "vllm-rate": vllm_rate.COMMAND,
    "vllm-rate-together": vllm_rate.COMMAND,
    "h100-vllm-rate-together": vllm_rate.COMMAND,
    "vllm-prefill": vllm_prefill.COMMAND,
    "vllm-prefill-together": vllm_prefill.COMMAND,
    "sglang-rate": sglang_rate.COMMAND,
}
SCENES = {
    "vllm": partial(scenes.page, ours=VLLM),
    "h100-vllm": partial(scenes.page, ours=VLLM),
    "h100-vllm-invariance": invariance.page,
    "h100-sglang-invariance": invariance.page,
    "sglang": partial(scenes.page, ours=SGLANG),
    "h100-sglang": partial(scenes.page, ours=SGLANG),
}
NOT_FROM_NUMBERS = {"transformers"}  # what a test of the library prints


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_of_its_rows(name):
    made, module = json.loads((REPORTS / f"{name}.json").read_text()), TABLES[name]
    lines = [str(made["facts"]), "", module.header(), *map(module.line, made["rows"])]
    assert (REPORTS / f"{name}.md").read_text() == "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", PEERS)
def test_the_decode_page_is_generated_from_its_rows(name, tmp_path):
    facts = json.loads((REPORTS / f"{name}.json").read_text())
    write(tmp_path / f"{name}.v2", facts, facts.pop("rows"), PEERS[name])
    for suffix in (".md", ".json"):
        page = (tmp_path / f"{name}.v2{suffix}").read_text()
        assert page == (REPORTS / name).with_suffix(suffix).read_text()


@pytest.mark.parametrize("name", RATES)
def test_rates_are_of_their_cells(name, monkeypatch, capsys):
    folder = REPORTS / "engines" / name
    monkeypatch.setattr("sys.argv", ["rate", "--table", "--folder", str(folder)])
    assert RATES[name].main("Time.", None) == 0
    assert capsys.readouterr().out == folder.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", SCENES)
def test_scenes_are_of_what_was_found(name):
    page = REPORTS / "engines" / name
    found = json.loads(page.with_suffix(".json").read_text())
    assert SCENES[name](found) == page.with_suffix(".md").read_text()


def test_every_page_is_held():
    pages = {path.stem for path in REPORTS.rglob("*.md")}
    assert pages == {*TABLES, *PEERS, *RATES, *SCENES, *NOT_FROM_NUMBERS}
