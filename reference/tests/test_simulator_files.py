"""Traces as files, logs of traffic, and the page one looks at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulator_runs import TINY

from paged_mla_reference.simulator.batches import lay_out
from paged_mla_reference.simulator.command import main
from paged_mla_reference.simulator.config import EngineConfig
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.generated import generated
from paged_mla_reference.simulator.request_log import read_log
from paged_mla_reference.simulator.scenario import drive, load_scenario, save_scenario
from paged_mla_reference.simulator.scenarios import CORE, core_scenario
from paged_mla_reference.simulator.table import schedule_table
from paged_mla_reference.simulator.timeline import Mark, mark_in_report, render, timeline_of
from paged_mla_reference.simulator.trace import record, trace_of
from paged_mla_reference.simulator.trace_file import load_trace, save_trace
from paged_mla_reference.simulator.workloads import WORKLOADS
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["trees", "ranks"])
def test_a_trace_survives_its_file(tmp_path: Path, name: str, dtype: str):
    """S-19: every bit of batches and outputs is read back, also in bfloat16."""
    scenario = core_scenario(name)
    trace = trace_of(scenario, TINY, dtype)
    save_trace(trace, record(scenario, TINY, dtype), tmp_path / "trace.npz")
    loaded, steps = load_trace(tmp_path / "trace.npz")
    assert loaded == trace
    for mine, theirs in zip(steps, record(scenario, TINY, dtype), strict=True):
        assert (mine.number, mine.rank, mine.mask) == (theirs.number, theirs.rank, theirs.mask)
        assert mine.tokens == theirs.tokens
        for field in Batch.__dataclass_fields__:
            left, right = getattr(mine.batch, field), getattr(theirs.batch, field)
            assert (left is None) == (right is None)
            if left is not None:
                assert left.dtype == right.dtype
                assert left.tobytes() == right.tobytes()
        for field, array in vars(theirs.exact).items():
            np.testing.assert_array_equal(getattr(mine.exact, field), array)
        np.testing.assert_array_equal(mine.rounded.out, theirs.rounded.out)
        np.testing.assert_array_equal(mine.rounded.lse, theirs.rounded.lse)


@pytest.mark.parametrize("cache_format", ["fp8_block_group", "bf16"])
def test_a_trace_without_known_outputs(
    tmp_path: Path, cache_format: str, capsys: pytest.CaptureFixture[str]
):
    """S-19: tokens that share scales depend on their schedule; a plain cache is of its dtype."""
    path, page = tmp_path / "scenario.json", tmp_path / "page.html"
    save_scenario(replace(core_scenario("chunks"), cache_format=cache_format), path)
    arguments = ["--scenario", str(path), "--html", str(page)]
    assert main([*arguments, "--trace", str(tmp_path / "trace.npz")]) == 2
    assert f"cache_format: got {cache_format}" in capsys.readouterr().err
    assert not page.exists()
    assert main([*arguments]) == 0


def test_a_trace_opens_with_numpy_alone(tmp_path: Path):
    """S-19: an implementation in any language needs a zip reader and the npy format."""
    scenario = core_scenario("chunks")
    path = tmp_path / "trace.npz"
    save_trace(trace_of(scenario, TINY, "bfloat16"), record(scenario, TINY, "bfloat16"), path)
    with np.load(path) as arrays:
        assert arrays["000000000/q_nope"].dtype == np.uint16
        assert json.loads(arrays["header.json"])["version"] == 2


def test_steps_are_read_one_by_one(tmp_path: Path):
    """S-19: a trace need not fit in memory, neither written nor read."""
    scenario, path = core_scenario("chunks"), tmp_path / "trace.npz"
    taken = []

    def counted():
        for step in record(scenario, TINY, "float32"):
            taken.append(step.number)
            yield step

    save_trace(trace_of(scenario, TINY, "float32"), counted(), path)
    _, steps = load_trace(path)
    assert next(steps).number == 0
    assert len(taken) > 1


def test_an_unknown_version_is_refused(tmp_path: Path):
    """S-19: a file of another version is no guess."""
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("header.json", '{"version": 7}')
    with pytest.raises(InvalidArgument, match="version"):
        load_trace(tmp_path / "t.npz")


def test_a_log_by_hand():
    """S-13: lengths and groups are enough to share what was shared."""
    group = {"prefix_group": "g", "prefix_len": 4}
    tail = {"output_len": 1, "extra_keys": ["lora"], "abort": 3}
    lines = [
        '{"arrival": 0, "prompt": [1, 2, 3], "output": [4]}',
        "",
        json.dumps({"id": "b", "arrival": 1.5, "prompt_len": 6, **group, "output_len": 2}),
        json.dumps({"id": "c", "arrival": 2, "prompt_len": 5, **group, **tail}),
    ]
    first, second, third = read_log(lines, steps_per_unit=10)
    assert (first.id, first.prompt, first.output, first.arrival) == ("1", (1, 2, 3), (4,), 0)
    assert (len(second.prompt), len(second.output), second.arrival) == (6, 2, 15)
    assert second.prompt[:4] == third.prompt[:4]
    assert second.prompt[4] != third.prompt[4]
    assert (third.extra_keys, third.abort) == (("lora",), 30)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("[1]", "one JSON object"),
        ("{", "one JSON object"),
        ('{"prompt": [1], "output": [2]}', "arrival"),
        (
            '{"arrival": 0, "prompt": [1]}',
            "got neither output nor output_len; allowed: exactly one of the two",
        ),
        (
            '{"arrival": 0, "prompt": [1], "prompt_len": 1, "output": [2]}',
            "got both prompt and prompt_len; allowed: exactly one of the two",
        ),
        ('{"arrival": 0, "prompt_len": 2, "prefix_len": 3, "output_len": 1}', "prefix_len"),
        ('{"arrival": 0, "promt": [1], "output": [2]}', "promt"),
    ],
    ids=["list", "broken", "arrival", "no-output", "both", "prefix", "typo"],
)
def test_a_bad_line_is_named(line: str, match: str):
    """S-2: the error of an unreadable log names the line."""
    with pytest.raises(InvalidArgument, match=match) as caught:
        read_log(["", line])
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads_are_reproducible(name: str):
    """S-19: equal seeds, equal traffic; other seeds, other traffic."""
    assert WORKLOADS[name](3, 6, 8) == WORKLOADS[name](3, 6, 8)
    assert WORKLOADS[name](3, 6, 8) != WORKLOADS[name](4, 6, 8)
    assert generated(5) == generated(5)


def test_a_report_marks_its_step():
    """S-19: the place in a suite's message becomes a mark on the page of that trace only."""
    message = "E   TraceMismatch: [S-5] trace trees, step 4, rank 0, token 7 (tree of a): out: 1"
    report = {"results": [{"test": "a"}, {"test": "b", "message": f"some\n{message}\nmore"}]}
    assert mark_in_report(report, "trees") == Mark(4, 7, message[message.index("[") :])
    assert mark_in_report(report, "chains") is None
    report = {"results": [{"test": "a", "message": "trace trees, step 4, rank 1: [S-10] cache"}]}
    assert mark_in_report(report, "trees") == Mark(4, None, report["results"][0]["message"])


def test_the_page_needs_no_other_file():
    """S-19: one file holds the whole schedule and the mark."""
    scenario = core_scenario("prefixes")
    page = render(timeline_of(scenario), Mark(3, 1, "out </script> <!--<script> 1 < 2"))
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    assert len(data["steps"]) == 20
    assert data["mark"]["token"] == 1
    assert page.count("</script>") == 1
    assert "<!--" not in page  # behind it a browser takes the end of the script for text
    assert not re.search(r"https?:|src=|@import", page)


def test_blocks_of_the_page():
    """S-13: free, cached, exclusively used and shared blocks have different codes."""
    timeline = timeline_of(core_scenario("prefixes"))
    state, seen = [0] * timeline["num_blocks"], set()
    for step in timeline["steps"]:
        for block, value in step["changed"]:
            state[block] = value
        seen |= {min(value, 2 + value % 2) for value in state}
    assert seen == {0, 1, 2, 3}
    assert set(state) <= {0, 1}  # in the end nobody has any


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """S-19: a schedule is simulated, shown, saved and replayed from the command line."""
    page, saved, trace = (tmp_path / name for name in ("s.html", "s.json", "s.npz"))
    options = ["--html", str(page), "--save", str(saved), "--trace", str(trace)]
    assert main(["chunks", *options]) == 0
    assert "9 steps, 4 requests" in capsys.readouterr().out
    assert load_scenario(saved) == core_scenario("chunks")
    assert main(["--scenario", str(saved)]) == 0
    assert main(["--generated", "3"]) == 0
    assert "<canvas" in page.read_text()
    assert trace.stat().st_size > 1000


@pytest.mark.parametrize("drafts", [[], ["--chain", "2"], ["--tree", "2x3"]], ids=str)
def test_the_command_replays_a_log(tmp_path: Path, drafts: list[str]):
    """S-19: real traffic, by lengths, on an engine of any shape."""
    log = tmp_path / "monday.jsonl"
    line = {"prompt_len": 90, "prefix_group": "s", "prefix_len": 64, "output_len": 5}
    log.write_text("".join(json.dumps({"arrival": i, **line}) + "\n" for i in range(5)))
    options = ["--block-size", "16", "--buckets", "1,2,4,8", "--html", str(tmp_path / "x.html")]
    assert main(["--log", str(log), *options, *drafts]) == 0


def test_a_missing_log_is_an_error(capsys: pytest.CaptureFixture[str]):
    """S-2: the error is one line."""
    assert main(["--log", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_a_schedule_as_text():
    """S-2: one line per step, each row with its context and query tokens."""
    scenario = core_scenario("chunks")
    lines = schedule_table(drive(Engine(scenario.config), scenario.requests)).splitlines()
    assert len(lines) == 1 + 9
    assert "short: prefill 0+3 @ " in lines[1]
    assert "nine-and-one: prefill 9+1" in lines[2]


def test_a_reader_that_stops_early_costs_no_traceback():
    """S-19: as in ``simulate preemption | head -1``."""
    command = [sys.executable, "-m", "paged_mla", "simulate", "preemption"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.communicate(timeout=60)[1] == b""
    assert run.returncode == 141


def test_core_scenarios_are_named_once():
    """S-19: a name is an id."""
    assert len({scenario.name for scenario in CORE}) == len(CORE)


@pytest.mark.parametrize("steps", [300])
def test_scheduling_is_fast_and_linear(steps: int):
    """S-17: 64 rows are scheduled in well under 10 ms a step, the last as fast as the first."""
    config = EngineConfig(block_size=64, num_blocks=2048, max_rows=64, token_budget=512)
    requests = WORKLOADS["multi_turn"](1, 64, 200)
    engine, spent = Engine(config), []
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        start = time.perf_counter()
        lay_out(engine.step().rows)
        spent.append(time.perf_counter() - start)
    assert engine.busy
    assert sum(spent) < 0.01 * steps
    assert np.median(spent[-50:]) < 4 * np.median(spent[50:100])


def test_names_from_files_do_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A scenario of somebody else cannot clear the screen, or forge a line."""
    path = tmp_path / "scenario.json"
    main(["chunks", "--save", str(path)])
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"name": "x\x1b[2J", "why": "\nok    all rules hold"}))
    capsys.readouterr()
    assert main(["--scenario", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == r"x\x1b[2J: \nok    all rules hold"
    path.write_text(json.dumps(document | {"\x1b[2J": 1}))
    assert main(["--scenario", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err
