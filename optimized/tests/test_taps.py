"""What a kernel goes through is seen in the interpreter: scores, maxima, sums, parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mla_step import P, R, build, config

from paged_mla_optimized import PagedMla, record
from paged_mla_optimized.commands.taps import main
from paged_mla_optimized.inspect import taps
from paged_mla_optimized.kernels.portable import attend
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.dump import Dump, load_dump
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.taps import load_taps

TOKEN, HEAD, SEEN = 2, 1, 149  # the second of three queries of a row of 150 keys


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    step = build((20, 1), (150, 3))
    step.cache.nan_to_num_(0)
    mla = PagedMla(step.config, "cpu")
    with record(mla, tmp_path) as recorder:
        step.attend(mla)
    return recorder.written[0]


def test_scores_and_parts_are_those_of_the_keys(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-5, S-7, S-8: every key once; each part's numbers follow from its scores."""
    path = tmp_path / "taps.safetensors"
    arguments = [str(dump), "--token", str(TOKEN), "--head", str(HEAD), "--out", str(path)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    found, given = load_taps(path), load_dump(dump).arrays
    assert (found.token, found.head) == (TOKEN, HEAD)
    np.testing.assert_array_equal(found.keys, np.arange(SEEN))
    slots = given["cache_after"].reshape(-1, R + P)
    table = [list(given["block_ids"]).index(block) for block in given["block_table"][1, :10]]
    at = np.repeat(table, 16)[:SEEN] * 16 + np.arange(SEEN) % 16
    query = np.concatenate([given["q_nope"][TOKEN, HEAD], given["q_pe"][TOKEN, HEAD]])
    np.testing.assert_allclose(found.scores, 0.2 * slots[at] @ query, rtol=1e-5, atol=1e-5)
    assert len(found.spans) > 1
    for number, (first, last) in enumerate(found.spans):
        scores = found.scores[first : last + 1].astype(np.float64)
        weights = np.exp(scores - scores.max())
        mean = weights @ slots[at[first : last + 1], :R] / weights.sum()
        assert found.highest[number] == pytest.approx(scores.max())
        assert found.total[number] == pytest.approx(weights.sum(), rel=1e-5)
        assert found.part_lse[number] == pytest.approx(scores.max() + np.log(weights.sum()))
        np.testing.assert_allclose(found.part_out[number], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.out, given["out"][TOKEN, HEAD], rtol=1e-5, atol=1e-6)
    assert found.lse == pytest.approx(given["lse"][TOKEN, HEAD])


def test_the_kernel_is_left_as_it_was(dump: Path):
    """No tap is installed any more."""
    kept = attend.tap_tile, attend.tap_part
    taps.taps_of(load_dump(dump), TOKEN, HEAD)
    assert (attend.tap_tile, attend.tap_part) == kept


@pytest.mark.parametrize(
    ("token", "head", "named"), [(9, 0, "token"), (0, 4, "head")], ids=["token", "head"]
)
def test_what_the_dump_does_not_have(dump: Path, token: int, head: int, named: str):
    """Named, with what is allowed."""
    with pytest.raises(InvalidArgument, match=named):
        taps.taps_of(load_dump(dump), token, head)


def test_a_row_longer_than_its_table(dump: Path):
    """S-1: dumps are of steps that went wrong, and this one the kernel would read past."""
    whole = load_dump(dump)
    longer = {**whole.arrays, "seq_lens": whole.arrays["seq_lens"] + 100_000}
    with pytest.raises(InvalidArgument, match=r"block_table: got \d+ columns; allowed: at least"):
        taps.taps_of(Dump(problem=whole.problem, arrays=longer), TOKEN, HEAD)


def test_a_dump_without_a_cache(dump: Path, capsys: pytest.CaptureFixture[str]):
    """The command reports what is missing."""
    whole = load_dump(dump)
    some = {name: x for name, x in whole.arrays.items() if name != "cache_after"}
    with pytest.raises(InvalidArgument, match="no cache_after"):
        taps.taps_of(Dump(problem=whole.problem, arrays=some), 0, 0)
    assert main([str(dump.parent / "none"), "--token", "0", "--out", "x"]) == 2
    assert "taps:" in capsys.readouterr().err


def test_compiled_kernels_have_none(dump: Path, monkeypatch: pytest.MonkeyPatch):
    """The error names the variable to set."""
    monkeypatch.setattr(taps, "is_interpreting", lambda: False)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        taps.taps_of(load_dump(dump), 0, 0)


@pytest.mark.parametrize("cache_format", ["fp8_e4m3", "fp8_ds_mla", "fp8_block_token"])
def test_caches_of_8_bits(cache_format: str, tmp_path: Path):
    """S-11: the parts merge to the output that the step had."""
    mla = PagedMla(config(cache_format=cache_format, max_rows=1), "cpu")
    step = build((40, 1), cache_format="fp32")
    codes = torch.randint(0, 100, (len(step.cache), 16, _width(cache_format)), dtype=torch.uint8)
    scales = {"fp8_e4m3": torch.tensor(0.5), "fp8_block_token": torch.rand(len(codes), 1, 16) + 1}
    cache = taps.LatentCache(cache_format, codes, scales.get(cache_format))
    if cache_format == "fp8_ds_mla":
        codes[..., R : R + 16] = torch.tensor([0, 0, 128, 63] * 4, dtype=torch.uint8)  # scales of 1
    with record(mla, tmp_path) as recorder:
        mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table[:, :3], num_tokens=1))
        mla.attend(step.q_nope, step.q_pe, cache)
    given = load_dump(recorder.written[0])
    found = taps.taps_of(given, 0, 2)
    np.testing.assert_allclose(found.out, given.arrays["out"][0, 2], rtol=1e-5)
    assert found.lse == pytest.approx(given.arrays["lse"][0, 2])


def _width(cache_format: str) -> int:
    return R + P if cache_format != "fp8_ds_mla" else R + 16 + 2 * P
