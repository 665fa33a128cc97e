"""Untrusted files: logs, scenarios and reports are read, or an error names the wrong part."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from paged_mla_reference.simulator.command import main
from paged_mla_reference.simulator.request_log import load_log
from paged_mla_reference.simulator.scenario import load_scenario, save_scenario
from paged_mla_reference.simulator.scenarios import core_scenario
from paged_mla_shared.errors import InvalidArgument

GOOD_LINE = {"arrival": 0, "prompt_len": 3, "output_len": 2}
BAD_LINES = {
    "arrival-1e9": ({"arrival": 1e9}, "arrival"),
    "arrival-1e300": ({"arrival": 1e300}, "arrival"),
    "arrival-negative": ({"arrival": -1}, "arrival"),
    "arrival-null": ({"arrival": None}, "arrival"),
    "arrival-bool": ({"arrival": True}, "arrival"),
    "arrival-string": ({"arrival": "0"}, "arrival"),
    "arrival-nan": ({"arrival": float("nan")}, "NaN"),
    "arrival-infinity": ({"arrival": float("inf")}, "Infinity"),
    "abort-before-arrival": ({"arrival": 2, "abort": 1}, "abort"),
    "abort-infinity": ({"abort": float("-inf")}, "-Infinity"),
    "abort-1e300": ({"abort": 1e300}, "abort"),
    "abort-string": ({"abort": "never"}, "abort"),
    "prompt-1e9-tokens": ({"prompt_len": 10**9}, "prompt_len"),
    "prompt-no-tokens": ({"prompt_len": 0}, "prompt_len"),
    "prompt-negative": ({"prompt_len": -1}, "prompt_len"),
    "prompt-float": ({"prompt_len": 3.5}, "prompt_len"),
    "prompt-bool": ({"prompt_len": True}, "prompt_len"),
    "prompt-empty": ({"prompt": [], "prompt_len": None}, "prompt"),
    "prompt-of-strings": ({"prompt": ["a"], "prompt_len": None}, r"prompt\[0\]"),
    "prompt-of-floats": ({"prompt": [1, 2.5], "prompt_len": None}, r"prompt\[1\]"),
    "prompt-of-bools": ({"prompt": [True], "prompt_len": None}, r"prompt\[0\]"),
    "prompt-of-nulls": ({"prompt": [None], "prompt_len": None}, r"prompt\[0\]"),
    "prompt-of-negatives": ({"prompt": [-1], "prompt_len": None}, "prompt"),
    "prompt-of-1e30": ({"prompt": [10**30], "prompt_len": None}, r"prompt\[0\]"),
    "prompt-a-string": ({"prompt": "123", "prompt_len": None}, "prompt"),
    "output-1e9-tokens": ({"output_len": 10**9}, "output_len"),
    "prefix-negative": ({"prefix_group": "g", "prefix_len": -1}, "prefix_len"),
    "prefix-without-group": ({"prefix_len": 1}, "prefix_len"),
    "group-number": ({"prefix_group": 1, "prefix_len": 1}, "prefix_group"),
    "id-number": ({"id": 7}, "id"),
    "id-half-a-character": ({"id": "\ud800"}, "id"),
    "extra-keys-string": ({"extra_keys": "lora"}, "extra_keys"),
    "extra-keys-of-numbers": ({"extra_keys": [1]}, r"extra_keys\[0\]"),
    "unknown-field": ({"promt": 1}, "promt"),
}


def refuse_quickly(load, *arguments, match: str) -> str:
    """Return the one line with which `load` refuses, within a second."""
    began = time.process_time()
    with pytest.raises(InvalidArgument, match=match) as caught:
        load(*arguments)
    assert time.process_time() - began < 1
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(("changes", "match"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_of_a_log(tmp_path: Path, changes, match: str):
    """S-19: file, line and field are named."""
    path = tmp_path / "monday.jsonl"
    path.write_text(f"\n{json.dumps(GOOD_LINE)}\n{json.dumps(GOOD_LINE | changes)}\n")
    message = refuse_quickly(load_log, path, match=match)
    assert f"{path}, line 3" in message
    assert "allowed: " in message


BAD_TEXTS = {
    "empty": b"",
    "blank": b"\n \n",
    "binary": bytes(range(256)),
    "half-an-object": b'{"arrival": 0',
    "list": b"[]",
    "null": b"null",
    "deep-list": b"[" * 100_000,
    "deep-object": b'{"version": ' * 100_000,
    "deep-value": b'{"version": 1, "name": ' + b"[" * 100_000,
    "number-1e400": b'{"version": 1e400}',
    "number-of-5000-digits": b'{"version": ' + b"1" * 5000 + b"}",
    "key-twice": b'{"version": 1, "version": 2}',
    "long-string": b'{"version": "' + b"x" * 10_000_000 + b'"}',
    "many-lists": b'{"version": [' + b"[]," * 2_000_000 + b"[]]}",
    "huge": b" " * (16 * 2**20 + 1),
    "other-version": b'{"version": 2}',
    "version-true": b'{"version": true}',
    "no-version": b"{}",
}
LOADERS = {"log": load_log, "scenario": load_scenario}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_what_is_no_such_file(tmp_path: Path, loader, text: bytes):
    """S-19: for any bytes, the error is one line that names the file."""
    path = tmp_path / "file.json"
    path.write_bytes(text)
    assert str(path) in refuse_quickly(loader, path, match="allowed")


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("kind", ["folder", "missing", "pipe", "device"])
def test_what_is_no_file(tmp_path: Path, loader, kind: str):
    """S-19: a folder is not read, a pipe not waited for."""
    path = tmp_path / "thing"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    assert str(path) in refuse_quickly(loader, path, match="allowed")


def test_ids_of_a_log_are_distinct(tmp_path: Path):
    """S-13: a request's tokens are found by its id."""
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(GOOD_LINE | {'id': '2'})}\n{json.dumps(GOOD_LINE)}\n")
    refuse_quickly(load_log, path, match="line 2: id: got '2'")


def test_a_log_is_as_long_as_it_may_be(tmp_path: Path):
    """S-19: many long lines together are refused before their tokens are made up."""
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(GOOD_LINE | {'prompt_len': 2**20 - 3})}\n" * 100)
    refuse_quickly(load_log, path, match="line 2: got 2097150 tokens up to this line")
    path.write_text(f"{json.dumps(GOOD_LINE)}\n" * 100_000)
    refuse_quickly(load_log, path, match="100000 requests")


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_unit_is_a_time(tmp_path: Path, factor: float):
    """S-19: steps per unit of time are a number."""
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(GOOD_LINE))
    refuse_quickly(load_log, path, factor, match="steps_per_unit")


def test_null_is_as_good_as_nothing(tmp_path: Path):
    """S-19: many writers of logs spell every field."""
    path = tmp_path / "log.jsonl"
    nothing = dict.fromkeys(("id", "prompt", "prefix_group", "output", "abort"))
    path.write_text(json.dumps(GOOD_LINE | nothing))
    (request,) = load_log(path)
    assert (request.id, len(request.prompt), request.abort) == ("1", 3, None)


BAD_FIELDS = {
    "name-missing": (("name",), ..., "name: got no value"),
    "name-number": (("name",), 3, "name"),
    "why-null": (("why",), None, "why"),
    "config-list": (("config",), [], "config"),
    "config-unknown-field": (("config", "sise"), 3, "sise"),
    "blocks-1e12": (("config", "num_blocks"), 10**12, "num_blocks"),
    "blocks-negative": (("config", "num_blocks"), -1, "num_blocks"),
    "blocks-bool": (("config", "num_blocks"), True, "num_blocks"),
    "blocks-float": (("config", "num_blocks"), 8.0, "num_blocks"),
    "block-size-zero": (("config", "block_size"), 0, "block_size"),
    "rows-1e12": (("config", "max_rows"), 10**12, "max_rows"),
    "order-unknown": (("config", "order"), "best_first", "order"),
    "order-list": (("config", "order"), ["decode_first"], "order"),
    "buckets-string": (("config", "buckets"), "12", "buckets"),
    "buckets-1e12": (("config", "buckets"), [10**12], "buckets"),
    "drafts-list": (("config", "drafts"), [], "drafts"),
    "depth-1e12": (("config", "drafts", "depth"), 10**12, "depth"),
    "branches-1e12": (("config", "drafts", "branches"), 10**12, "branches"),
    "acceptance-2": (("config", "drafts", "acceptance"), 2.0, "acceptance"),
    "acceptance-nan": (("config", "drafts", "acceptance"), float("nan"), "NaN"),
    "world-zero": (("config", "group", "world"), 0, "world"),
    "world-1e12": (("config", "group", "world"), 10**12, "world"),
    "interleave-zero": (("config", "group", "interleave"), 0, "interleave"),
    "seed-null": (("config", "seed"), None, "seed"),
    "requests-object": (("requests",), {}, "requests"),
    "request-number": (("requests", 0), 3, r"requests\[0\]"),
    "arrival-1e9": (("requests", 1, "arrival"), 10**9, r"requests\[1\]: arrival|arrival"),
    "arrival-negative": (("requests", 1, "arrival"), -1, "arrival"),
    "prompt-empty": (("requests", 0, "prompt"), [], "prompt"),
    "prompt-string": (("requests", 0, "prompt"), "abc", "prompt"),
    "prompt-negative": (("requests", 0, "prompt"), [-1], "prompt"),
    "prompt-too-long": (("requests", 0, "prompt"), [0] * 10_000, "that fits in all blocks"),
    "id-again": (("requests", 1, "id"), "a", "distinct"),
    "rope-unknown": (("rope",), "spiral", "rope"),
    "heads-1e12": (("num_heads",), 10**12, "num_heads"),
    "spelling-null": (("mask_spelling",), None, "mask_spelling"),
}


@pytest.mark.parametrize(("place", "value", "match"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_bad_field_of_a_scenario(tmp_path: Path, place, value, match: str):
    """S-19: file and field are named."""
    path = tmp_path / "scenario.json"
    save_scenario(core_scenario("trees"), path)
    document = json.loads(path.read_text())
    at = document
    for step in place[:-1]:
        at = at[step]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    path.write_text(json.dumps(document))
    assert str(path) in refuse_quickly(load_scenario, path, match=match)


def test_ranks_do_not_rotate(tmp_path: Path):
    """S-18: a rank's indices are not positions; the error is raised before a step runs."""
    path = tmp_path / "scenario.json"
    save_scenario(core_scenario("ranks"), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope": "neox"}))
    assert str(path) in refuse_quickly(load_scenario, path, match="rope: got 'neox'")


BAD_REPORTS = {
    "no-results": "{}",
    "results-object": '{"results": {}}',
    "result-list": '{"results": [[]]}',
    "no-test": '{"results": [{}]}',
    "message-number": '{"results": [{"test": "a", "message": 3}]}',
    "list": "[]",
}


@pytest.mark.parametrize("text", BAD_REPORTS.values(), ids=BAD_REPORTS)
def test_a_bad_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    """S-19: what is no report of the suite is named, and no page is written."""
    report, page = tmp_path / "mla.json", tmp_path / "page.html"
    report.write_text(text)
    assert main(["chunks", "--html", str(page), "--report", str(report)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(report) in line
    assert not page.exists()


@pytest.mark.parametrize("step", ["9" * 5000, "4"])
def test_a_report_of_another_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str):
    """S-19: the output states that the page has no mark."""
    report, page = tmp_path / "mla.json", tmp_path / "page.html"
    message = f"trace chunky, step {step}, rank 0"
    report.write_text(json.dumps({"results": [{"test": "a", "message": message}]}))
    assert main(["chunks", "--html", str(page), "--report", str(report)]) == 0
    assert "nothing is marked" in capsys.readouterr().out


IDLE = {
    "size-of-a-named-engine": ["chunks", "--block-size", "8"],
    "chain-of-a-generated-one": ["--generated", "3", "--chain", "2"],
    "unit-without-a-log": ["chunks", "--steps-per-unit", "50"],
    "order-without-a-log": ["chunks", "--order", "decode_first"],
    "report-without-a-page": ["chunks", "--report", "mla.json"],
    "dims-without-a-trace": ["chunks", "--dims", "small"],
    "dtype-without-a-trace": ["chunks", "--dtype", "float32"],
}


@pytest.mark.parametrize("arguments", IDLE.values(), ids=IDLE)
def test_an_option_without_effect_is_refused(arguments, capsys: pytest.CaptureFixture[str]):
    """S-19: an option that nothing reads is a misunderstanding."""
    assert main([*arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "only with --" in line


BAD_OPTIONS = {
    "two-sources": ["chunks", "--generated", "3"],
    "chain-and-tree": ["--log", "x", "--chain", "2", "--tree", "2x2"],
    "tree-of-words": ["--log", "x", "--tree", "wide"],
    "tree-of-three": ["--log", "x", "--tree", "1x2x3"],
    "buckets-of-words": ["--log", "x", "--buckets", "one"],
    "chain-zero": ["--log", "x", "--chain", "0"],
    "rows-negative": ["--log", "x", "--max-rows", "-1"],
}


@pytest.mark.parametrize("arguments", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option(arguments, capsys: pytest.CaptureFixture[str]):
    """S-19: argparse names the option."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    assert caught.value.code == 2
    assert "argument" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num-blocks=999999999999", "--tree=99x1", "--chain=3000"])
def test_an_engine_too_large(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]):
    """S-19: no size of an engine takes the memory of the machine."""
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(GOOD_LINE))
    assert main(["--log", str(log), option]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_log_that_the_engine_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """S-2: the request is named before anything runs."""
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps(GOOD_LINE)}\n{json.dumps(GOOD_LINE | {'prompt_len': 999})}\n")
    options = ["--block-size", "16", "--num-blocks", "9"]
    assert main(["--log", str(log), *options]) == 2
    assert f"{log}: requests[1]: got 1001 tokens" in capsys.readouterr().err
