"""What an explanation is written to: a terminal, JSON, a page, a picture."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dumped import case, dumped

from paged_mla_reference.explain.command import main
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.explain.render.maps import maps_of
from paged_mla_reference.explain.render.page import render
from paged_mla_reference.explain.render.trace import trace_of
from paged_mla_shared.cases import Row
from paged_mla_shared.dump import save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.safetensors"
    save_dump(dumped("causal-mask-is-top-left"), path)
    return path


def test_a_terminal_gets_text(wrong: Path, capsys: pytest.CaptureFixture[str]):
    """The verdict, the rule's text, the cause with its report, and where."""
    assert main([str(wrong)]) == 1
    said = capsys.readouterr().out
    assert "S-5 is broken in out" in said
    assert "causal-mask-is-top-left" in said
    assert "vllm#26042" in said
    assert re.search(r"row 0 \|@+\|", said)
    assert "\x1b" not in said


def test_a_right_step_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As a check in a script."""
    save_dump(dumped(), tmp_path / "right.safetensors")
    assert main([str(tmp_path / "right.safetensors")]) == 0
    assert "No rule is broken." in capsys.readouterr().out


def test_an_origin_does_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A dump of somebody else cannot hide what follows, or forge a line."""
    path = tmp_path / "step.safetensors"
    evil = "x\x1b[8m\nok    all rules hold"
    save_dump(replace(dumped("causal-mask-is-top-left"), origin=evil), path)
    assert main([str(path)]) == 1
    assert capsys.readouterr().out.startswith(r"x\x1b[8m\nok    all rules hold: ")


def test_json_of_an_explanation(wrong: Path, capsys: pytest.CaptureFixture[str]):
    """JSON, and nothing else."""
    assert main([str(wrong), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == 1
    assert document["hypotheses"][0]["links"]["vllm#26042"].startswith("https://github.com/")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "8 bytes"), (b"\xff" * 64, "header"), (b"\x02\0\0\0\0\0\0\0{}", "paged_mla_dump")],
)
def test_files_that_are_no_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
):
    """An error on one line, and no trace of Python."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("paged-mla explain: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_browser_opens_the_page(wrong: Path, tmp_path: Path):
    """Every section is drawn, and no script fails."""
    if BROWSER is None:
        pytest.skip("no chromium and no google-chrome on the path: the page is not opened")
    page = tmp_path / "page.html"
    assert main([str(wrong), "--html", str(page)]) == 1
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "S-5 is broken in out" in done.stdout
    for name in ("heads", "blocks", "ulps", "mask", "owners"):
        assert re.search(rf'<canvas id="{name}" width="[1-9]', done.stdout), name
    assert done.stdout.count("<section") == 6
    assert 'hidden=""' not in done.stdout


def test_a_page_is_safe():
    """Untrusted text of a dump is text on the page, not a script."""
    found = explain(replace(dumped(), origin="</script><script>alert(1)</script>"))
    page = render(found, maps_of(found.found))
    assert "</script><script>alert" not in page
    assert page.count("<script>") == 1


def test_a_picture_needs_matplotlib(
    wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The picture is drawn, or the error names the package to install."""
    picture = tmp_path / "x.png"
    status = main([str(wrong), "--png", str(picture)])
    if status == 2:
        assert "pip install 'paged-mla[pictures]'" in capsys.readouterr().err
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_maps_show_where():
    """Rows and heads that are wrong, the keys that are missing, the blocks of the rows."""
    found = explain(dumped("newest-key-is-not-counted", of=case((Row(40, 1), Row(70, 1)))))
    maps = maps_of(found.found)
    assert maps.rows == ["row 0", "row 1"]
    assert min(map(min, maps.by_head)) > 1
    assert maps.queries == ["token 0, row 0", "token 1, row 1"]
    assert [int(np.argmin(line)) for line in maps.by_block] == [
        39 // maps.block_keys,
        69 // maps.block_keys,
    ]
    assert sum(maps.ulps) == found.found.step.array("out").size
    assert maps.mask_row == 0


def test_a_step_of_unknown_trees_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """S-14: without its mask a step of draft trees is not checked, and not drawn."""
    trees = case((Row(37, 5), Row(70, 3)), mask=Mask.TREE)
    save_dump(dumped(of=trees, without=("mask",)), tmp_path / "x.safetensors")
    page = tmp_path / "x.html"
    assert main([str(tmp_path / "x.safetensors"), "--html", str(page)]) == 0
    assert "the dump has no mask" in capsys.readouterr().out
    assert page.exists()


def test_a_trace_adds_up():
    """S-7, S-8: weights sum to 1, and parts merge to the output."""
    dump = dumped(of=case(query_scale=300.0))  # an ulp of the lse is 6e-5
    for splits in (1, 3):
        trace = trace_of(dump, 4, 2, splits=splits)
        assert (trace.row, trace.position, len(trace.keys)) == (3, 129, 130)
        assert len(trace.parts) == splits
        assert sum(trace.weights) == pytest.approx(1, rel=1e-9)
        assert trace.actual_out == pytest.approx(trace.out, abs=1e-5)
        assert trace.actual_lse == pytest.approx(trace.lse, abs=1e-5)


def test_a_trace_shows_the_key_that_is_nan():
    """S-9: a trace shows the key that makes an output NaN."""
    dump = dumped()
    cache, block = dump.arrays["cache_after"], dump.arrays["block_table"][3, 1]
    cache[dump.arrays["block_ids"] == block, 2, 0] = np.nan
    trace = trace_of(dump, 4, 2, splits=2)
    assert np.flatnonzero(np.isnan(trace.scores)).tolist() == [66]
    assert [np.isnan(part.lse) for part in trace.parts] == [False, True]
    assert np.isnan(trace.lse)
    assert trace.text().splitlines()[3].split()[0] == "66"


def test_a_trace_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """S-5: by the same command."""
    path = tmp_path / "x.safetensors"
    save_dump(dumped(), path)
    assert main([str(path), "--token", "4", "--head", "1", "--splits", "2"]) == 0
    said = capsys.readouterr().out
    assert "token 4, head 1: row 3, position 129, sees 130 keys" in said
    assert "0 to 64" in said


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_json_of_a_trace(odd: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """S-6: NaN and infinities of an output are null in JSON."""
    dump = dumped()
    dump.arrays["out"][4, 1, 0], dump.arrays["lse"][4, 1] = odd, odd
    save_dump(dump, tmp_path / "x.safetensors")
    arguments = [str(tmp_path / "x.safetensors"), "--token", "4", "--head", "1", "--json"]
    assert main([*arguments]) == 0
    said = capsys.readouterr().out
    document = json.loads(said, parse_constant=pytest.fail)
    assert (document["actual_out"][0], document["actual_lse"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (("--token", "4", "--html", "x.html"), "an explanation"),
        (("--token", "4", "--png", "x.png"), "an explanation"),
        (("--head", "0"), "--token"),
        (("--splits", "2"), "--token"),
        (("--taps", "t.safetensors", "--token", "4"), "without --taps"),
        (("--taps", "t.safetensors", "--html", "x.html"), "without --taps"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: tuple[str, ...], needs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-20: an option is never ignored without an error."""
    path = tmp_path / "x.safetensors"
    save_dump(dumped(), path)
    assert main([str(path), *arguments]) == 2
    said = capsys.readouterr().err
    assert needs in said
    assert "otherwise it has no effect" in said


@pytest.mark.parametrize(
    ("token", "head", "splits", "message"),
    [(14, 0, 1, "token"), (0, 4, 1, "head"), (0, 0, 38, "splits")],
)
def test_traces_that_cannot_be(token: int, head: int, splits: int, message: str):
    """S-9: of tokens, heads and keys that are there."""
    with pytest.raises(InvalidArgument, match=message):
        trace_of(dumped(), token, head, splits=splits)
    with pytest.raises(InvalidArgument, match="cache"):
        trace_of(dumped(without=("cache_before", "cache_after")), 0, 0)
