"""Invalid replay files, and options of the search that would have no effect."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from paged_mla_conformance.meta.mutants.__main__ import main as mutants
from paged_mla_conformance.search.command import main
from paged_mla_conformance.search.corpus import load_case, save_case
from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.errors import InvalidArgument

REFERENCE = "paged_mla_reference.backend:create"
GOOD = Case(group="g", name="n", why="w", rules=("S-5",), rows=(Row(9, 2), Row(5, 1, 0)))

BAD_CASES = {
    "case-list": (("case",), [], "case"),
    "dtype-missing": (("dtype",), ..., "dtype: got no value"),
    "dtype-unknown": (("dtype",), "int4", "dtype: got 'int4'"),
    "version-other": (("version",), 2, "version: got 2"),
    "rows-object": (("case", "rows"), {}, "rows"),
    "row-list": (("case", "rows", 0), [1, 2], r"rows\[0\]"),
    "row-negative": (("case", "rows", 0, "seq_len"), -1, "row 0 of 0 to 1"),
    "row-float": (("case", "rows", 0, "seq_len"), 9.0, "seq_len: got 9.0"),
    "row-bool": (("case", "rows", 0, "query_len"), True, "query_len: got True"),
    "row-1e12": (("case", "rows", 0, "seq_len"), 10**12, "1000000000005 keys"),
    "query-longer-than-the-row": (("case", "rows", 0, "query_len"), 10, "row 0 of 0 to 1"),
    "query-of-1e12": (("case", "rows", 0), {"seq_len": 0, "query_len": 10**12}, "query tokens"),
    "prefix-of-itself": (("case", "rows", 1, "shares_prefix_of"), 1, "row 1 of 0 to 1"),
    "prefix-of-no-row": (("case", "rows", 1, "shares_prefix_of"), -1, "row 1 of 0 to 1"),
    "heads-zero": (("case", "num_heads"), 0, "num_heads"),
    "heads-1e12": (("case", "num_heads"), 10**12, "num_heads"),
    "block-size-zero": (("case", "block_size"), 0, "block_size"),
    "block-size-1e12": (("case", "block_size"), 10**12, "block_size"),
    "padding-1e12": (("case", "padded_tokens"), 10**12, "padded_tokens"),
    "padding-odd": (("case", "token_padding"), 3, "token_padding"),
    "table-1e12": (("case", "table_width"), 10**12, "table_width"),
    "cache-1e15": (("case", "cache_elements"), 10**15, "cache_elements"),
    "scale-negative": (("case", "softmax_scale"), -1.0, "softmax_scale"),
    "scale-nan": (("case", "query_scale"), float("nan"), "NaN"),
    "mask-unknown": (("case", "mask"), "some", "mask: got 'some'"),
    "rope-list": (("case", "rope"), [], "rope"),
    "rope-theta": (("case", "rope"), {"pairing": "neox", "theta": -1.0}, "rope"),
    "features-string": (("case", "features"), "replay", "features"),
    "pairs": (
        ("case", "rows", 0),
        {"seq_len": 1 << 18, "query_len": 1 << 10},
        "case.rows: got 1,073,741,844 pairs of a query and a key in 4 heads",
    ),
    "many-steps": (("case", "then"), [[]] * 64, "case.then: got 65 steps; allowed: at most 64"),
    "pairs-of-steps": (
        ("case", "then"),
        [[{"seq_len": 1 << 17, "query_len": 16}]] * 60,
        "case.rows: got 503,316,572 pairs",
    ),
    "unknown-field": (("case", "odd"), 1, "unknown field 'odd'"),
}


@pytest.mark.parametrize(("place", "value", "match"), BAD_CASES.values(), ids=BAD_CASES)
def test_a_bad_case(tmp_path: Path, place, value, match: str):
    """S-17: the error names the file and the field, within a second."""
    path = tmp_path / "case.json"
    save_case(GOOD, "float32", path)
    document = json.loads(path.read_text())
    at = document
    for step in place[:-1]:
        at = at[step]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    path.write_text(json.dumps(document))
    began = time.process_time()
    with pytest.raises(InvalidArgument, match=match) as caught:
        load_case(path)
    assert time.process_time() - began < 1
    assert str(caught.value).startswith(str(path))


def test_a_case_needs_only_what_differs(tmp_path: Path):
    """S-17: fields with a default may be left out, as in files of an older suite."""
    path = tmp_path / "case.json"
    fields = {name: asdict(GOOD)[name] for name in ("group", "name", "why", "rules", "rows")}
    path.write_text(json.dumps({"version": 1, "dtype": "float32", "case": fields}))
    assert load_case(path) == (GOOD, "float32")


BAD_FILES = {
    "empty": b"",
    "list": b"[]",
    "neither": b"{}",
    "binary": bytes(range(256)),
    "deep": b'{"case":' * 50_000,
    "schedule-without-requests": b'{"version": 1, "name": "a"}',
}


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_replay_is_one_line(tmp_path: Path, data, capsys: pytest.CaptureFixture[str]):
    """S-19: a file that cannot be read is no verdict on the backend: status 2, not 1."""
    path = tmp_path / "replay.json"
    path.write_bytes(data)
    assert main(["--backend", REFERENCE, "--replay", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paged-mla fuzz: {path}")


NO_SEARCH = ["--production", "0", "--examples", "0", "--cases", "0"]
IDLE = {
    "schedules-of-a-replay": ["--replay", "{file}", "--schedules", "5"],
    "seed-of-a-replay": ["--replay", "{file}", "--seed", "1"],
    "corpus-of-a-replay": ["--replay", "{file}", "--skip-corpus"],
    "folder-of-a-replay": ["--replay", "{file}", "--folder", "."],
    "first-of-no-number": ["--schedules", "0", "--production", "0", "--first", "7"],
    "seed-of-no-search": ["--examples", "0", "--cases", "0", "--seed", "7"],
    "folder-of-no-search": [*NO_SEARCH, "--folder", "."],
    "folder-that-is-not-there": ["--folder", "nowhere"],
    "nothing": [*NO_SEARCH, "--skip-corpus", "--schedules", "0"],
}


@pytest.mark.parametrize("arguments", IDLE.values(), ids=IDLE)
def test_an_option_without_effect(tmp_path: Path, arguments, capsys: pytest.CaptureFixture[str]):
    """S-19: the option is refused before anything runs."""
    path = tmp_path / "case.json"
    save_case(GOOD, "float32", path)
    given = [argument.format(file=path) for argument in arguments]
    assert main(["--backend", REFERENCE, *given]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paged-mla fuzz: --")


BAD_NUMBERS = {
    "schedules": (main, ["--backend", REFERENCE, "--schedules", "-1"]),
    "cases": (main, ["--backend", REFERENCE, "--cases", "many"]),
    "workers": (mutants, ["--workers", "0"]),
    "page-elsewhere": (mutants, ["--page", "nowhere/page.md"]),
}


@pytest.mark.parametrize(("command", "arguments"), BAD_NUMBERS.values(), ids=BAD_NUMBERS)
def test_a_bad_number(command, arguments, capsys: pytest.CaptureFixture[str]):
    """S-19: argparse names the option."""
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 2
    assert arguments[-2] in capsys.readouterr().err
