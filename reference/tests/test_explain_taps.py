"""Intermediate values of a kernel, compared with the rules: parts, keys and scores that differ."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dumped import dumped

from paged_mla_reference.explain.command import main
from paged_mla_reference.explain.render.tap_comparison import compare_taps
from paged_mla_reference.explain.render.trace import trace_of
from paged_mla_shared.dump import Dump, save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.taps import Taps, load_taps, save_taps

TOKEN, HEAD = 4, 2  # of a row of 130 keys
SPANS = ((0, 63), (64, 129))


def tapped(dump: Dump, spans: tuple[tuple[int, int], ...] = SPANS, lacking: int = -1) -> Taps:
    """Return what a kernel goes through that is right, but for a key."""
    trace = trace_of(dump, TOKEN, HEAD, spans=np.array(spans).reshape(-1, 2))
    seen = [key != lacking for key in trace.keys]
    return Taps(
        token=TOKEN,
        head=HEAD,
        keys=np.array(trace.keys)[seen],
        scores=np.array(trace.scores, np.float32)[seen],
        spans=np.array(spans, np.int64).reshape(-1, 2),
        highest=np.array([part.highest for part in trace.parts], np.float32),
        total=np.array([part.total for part in trace.parts], np.float32),
        part_lse=np.array([part.lse for part in trace.parts], np.float32),
        part_out=np.array([part.out for part in trace.parts], np.float32).reshape(-1, 32),
        lse=np.array(trace.lse, np.float32),
        out=np.array(trace.out, np.float32),
    )


def test_a_right_kernel_differs_by_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """S-5, S-7, S-8: the values of kernel and rules are compared in the kernel's own parts."""
    dump = dumped()
    save_dump(dump, tmp_path / "dump")
    save_taps(tapped(dump), tmp_path / "taps")
    assert main([str(tmp_path / "dump"), "--taps", str(tmp_path / "taps")]) == 0
    said = capsys.readouterr().out
    assert "token 4, head 2: row 3, position 129" in said
    assert "64 to 129" in said
    found = compare_taps(dump, load_taps(tmp_path / "taps"))
    assert max(number.error for number in found.scores.values()) < 1e-5
    assert max(part.out_error for part in found.parts) < 1e-5
    assert found.lse.error < 1e-5
    assert sum(number.tapped for number in found.weights.values()) == pytest.approx(1, rel=1e-5)


def test_a_key_that_the_kernel_did_not_see_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-4: it has a score by the rules and none of the kernel's; machines read null."""
    dump = dumped()
    found = compare_taps(dump, tapped(dump, lacking=77))
    assert found.scores[77].error == np.inf
    lines = found.text().splitlines()
    assert lines[3].split()[0] == "77"
    assert "nan" in lines[3]
    save_dump(dump, tmp_path / "dump")
    save_taps(tapped(dump, lacking=77), tmp_path / "taps")
    arguments = [str(tmp_path / "dump"), "--taps", str(tmp_path / "taps"), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["77"]["tapped"] is None


def test_a_part_with_a_key_too_many_has_its_right_values():
    """S-4: a kernel that reads key 130 of 130 keys is compared with the part from key 64 on."""
    dump = dumped()
    last = compare_taps(dump, tapped(dump, ((0, 63), (64, 130)))).parts[-1]
    assert (last.first, last.last) == (64, 130)
    assert last.total.error < 1e-5
    assert last.out_error < 1e-5


@pytest.mark.parametrize("spans", [((0, 63),), ((0, 63), (0, 129)), ()])
def test_parts_that_are_not_all_keys(spans: tuple[tuple[int, int], ...]):
    """S-8: the correct output is over all keys, for any parts of the kernel."""
    dump = dumped()
    whole, found = trace_of(dump, TOKEN, HEAD), compare_taps(dump, tapped(dump, spans))
    assert (found.lse.right, found.trace.out) == (whole.lse, whole.out)


@pytest.mark.parametrize("text", ["1", "no taps"])
def test_files_that_are_no_taps(tmp_path: Path, text: str):
    """A dump is none, and neither is any file."""
    path = tmp_path / "x"
    if text == "1":
        save_dump(dumped(), path)
    else:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=str(path)):
        load_taps(path)
