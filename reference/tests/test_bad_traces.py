"""Untrusted trace files: they are read step by step, or an error names the member and the fault."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from simulator_runs import TINY

from paged_mla_reference.simulator import trace_file
from paged_mla_reference.simulator.scenarios import core_scenario
from paged_mla_reference.simulator.trace import record, trace_of
from paged_mla_reference.simulator.trace_file import load_trace, save_trace
from paged_mla_shared.errors import InvalidArgument

FIRST = "000000000"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the members of a trace of one tree scenario, its first two steps."""
    scenario, path = core_scenario("trees"), tmp_path_factory.mktemp("good") / "trace.npz"
    save_trace(trace_of(scenario, TINY, "float32"), record(scenario, TINY, "float32"), path)
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n < "000000002" or n == "header.json"]
        return {name: archive.read(name) for name in names}


def npy(array: np.ndarray) -> bytes:
    """Return an array as the bytes of a npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def lying(descr: str, shape: str, data: bytes = b"", start: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    """Return an npy file whose header has the given descr and shape."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return start + struct.pack("<H", len(header)) + header + data


def refuse(path: Path, match: str) -> None:
    """Hold that the trace is refused with one short line, soon and in little memory."""
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(InvalidArgument, match=match) as caught:
        list(load_trace(path)[1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - began < 1
    assert peak < 64 * 2**20
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 1500


def edited(**changes) -> object:
    """Return a change of a JSON member: fields by name, ``...`` takes one away."""

    def change(data: bytes) -> bytes:
        document = json.loads(data) | changes
        return json.dumps({k: v for k, v in document.items() if v is not ...}).encode()

    return change


def of_causal(**changes) -> object:
    """Return a change of the causal problem in the header."""

    def change(data: bytes) -> bytes:
        document = json.loads(data)
        document["problems"]["causal"] |= changes
        return json.dumps(document).encode()

    return change


Q, STEP, LENS = f"{FIRST}/q_nope.npy", f"{FIRST}/step.json", f"{FIRST}/seq_lens.npy"
OUT = f"{FIRST}/exact_out.npy"
BAD_MEMBERS = {
    "header-missing": ("header.json", ..., "header.json: got nothing"),
    "header-empty": ("header.json", b"", "header.json"),
    "header-binary": ("header.json", bytes(range(256)), "header.json"),
    "header-deep": ("header.json", b'{"a":' * 50_000, "deep"),
    "header-large": ("header.json", b" " * (2**24 + 1), "at most 16777216"),
    "header-a-bomb": ("header.json", b" " * 2**28, "at most 16777216"),
    "version-other": ("header.json", edited(version=1), "version: got 1"),
    "version-missing": ("header.json", edited(version=...), "version: got None"),
    "world-zero": ("header.json", edited(world=0), "world: got 0"),
    "world-1e12": ("header.json", edited(world=10**12), "world"),
    "no-problems": ("header.json", edited(problems={}), "no causal problem"),
    "problems-list": ("header.json", edited(problems=[]), "problems"),
    "problem-of-another-mask": ("header.json", of_causal(mask="tree"), "problems.causal"),
    "format-unknown": ("header.json", of_causal(cache_format="int4"), "cache_format"),
    "rows-negative": ("header.json", of_causal(max_rows=-1), "max_rows"),
    "rows-float": ("header.json", of_causal(max_rows=8.0), "max_rows"),
    "scale-nan": ("header.json", of_causal(softmax_scale=float("nan")), "NaN"),
    "dims-other": ("header.json", of_causal(max_query_tokens=1), "max_query_tokens"),
    "step-missing": (STEP, ..., "step.json: got nothing"),
    "step-list": (STEP, b"[]", "step.json"),
    "step-of-another-rank": (STEP, edited(rank=1), "rank 1"),
    "step-of-a-negative-rank": (STEP, edited(rank=-1), "rank -1"),
    "step-of-no-mask": (STEP, edited(mask="non_causal"), "non_causal"),
    "tokens-of-two-words": (STEP, edited(tokens=[["a", "b"]]), r"tokens\[0\]"),
    "tokens-too-many": (STEP, edited(tokens=[["a", "b", 1]] * 1000), "1000 tokens"),
    "array-missing": (Q, ..., "q_nope.npy: got nothing"),
    "array-empty": (Q, b"", "q_nope.npy"),
    "array-text": (Q, b"hello", "q_nope.npy"),
    "array-pickled": (Q, npy(np.array([{}], object)), "q_nope.npy"),
    "array-of-records": (Q, npy(np.zeros(3, [("a", "i4")])), "q_nope.npy"),
    "array-big-endian": (LENS, npy(np.zeros(3, ">i4")), "seq_lens.npy"),
    "array-fortran": (Q, npy(np.zeros((3, 3), np.uint32, "F")), "q_nope.npy"),
    "array-without-data": (
        Q,
        lying("'<u4'", "(3, 2, 8)"),
        "an array with exactly the size of its member",
    ),
    "array-of-1e12": (
        Q,
        lying("'<u4'", "(999999999999,)"),
        "an array with exactly the size of its member",
    ),
    "array-of-1e48": (Q, lying("'<u4'", f"({'999999999999, ' * 4})"), "q_nope.npy"),
    "array-of-many-axes": (Q, lying("'<u4'", f"({'1, ' * 9999})"), "q_nope.npy"),
    "array-negative": (Q, lying("'<u4'", "(-1,)"), "q_nope.npy"),
    "array-of-code": (Q, lying("'<u4'", "(__import__('os').abort(),)"), "q_nope.npy"),
    "array-of-npy-3": (Q, lying("'<u4'", "(0,)", start=b"\x93NUMPY\x03\x00"), "q_nope.npy"),
    "array-a-bomb": (Q, b"\0" * (2**30 + 1), "bytes of arrays"),
    "queries-of-floats": (Q, npy(np.zeros((3, 2, 8), np.float64)), "bits of float32"),
    "queries-of-other-dims": (Q, npy(np.zeros((3, 2, 9), np.uint32)), "q_nope: got shape"),
    "queries-flat": (Q, npy(np.zeros(3, np.uint32)), "q_nope: got shape"),
    "lens-of-another-type": (LENS, npy(np.zeros(3, np.int64)), "seq_lens"),
    "answer-of-another-shape": (OUT, npy(np.zeros((1, 2, 3))), "exact_out: got float64"),
    "member-unknown": (f"{FIRST}/other.npy", npy(np.zeros(1)), "other.npy"),
    "member-of-the-parent": ("../evil.npy", npy(np.zeros(1)), r"\.\."),
    "member-at-the-top": ("readme", b"hello", "readme"),
    "steps-with-a-gap": ("000000003/step.json", b"{}", "000000003"),
}


@pytest.mark.parametrize(("name", "data", "match"), BAD_MEMBERS.values(), ids=BAD_MEMBERS)
def test_a_bad_member(tmp_path: Path, good: dict[str, bytes], name: str, data, match: str):
    """S-19: the file, the member and what is wrong with it."""
    members = dict(good)
    members[name] = data(members[name]) if callable(data) else data
    path = tmp_path / "trace.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for member, content in members.items():
            if content is not ...:
                archive.writestr(member, content)
    refuse(path, match)


@pytest.mark.parametrize("kind", ["empty", "text", "missing", "folder", "pipe", "lzma", "twice"])
def test_what_is_no_trace(tmp_path: Path, kind: str):
    """S-19: what no writer of traces makes."""
    path = tmp_path / "trace.npz"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in {"empty", "text"}:
        path.write_bytes(b"" if kind == "empty" else b"trace" * 1000)
    elif kind in {"lzma", "twice"}:
        method = zipfile.ZIP_LZMA if kind == "lzma" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("header.json", "{}")
            archive.filelist += archive.filelist if kind == "twice" else []
    refuse(path, "allowed")


def test_damage_is_named(tmp_path: Path, good: dict[str, bytes]):
    """S-19: with any damaged byte, the trace is either read or rejected with a named place."""
    path, rng = tmp_path / "trace.npz", random.Random(5)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in good.items():
            archive.writestr(name, data)
    whole, refused = path.read_bytes(), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            assert len(list(load_trace(path)[1])) <= 2
        except InvalidArgument:
            refused += 1
    assert refused > 200


def test_no_step_is_written_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """S-19: a trace whose steps are too large is refused when it is made."""
    monkeypatch.setattr(trace_file, "LARGEST_ARRAYS", 1000)
    scenario = core_scenario("chunks")
    steps = record(scenario, TINY, "float32")
    with pytest.raises(InvalidArgument, match="bytes of arrays in step 0"):
        save_trace(trace_of(scenario, TINY, "float32"), steps, tmp_path / "trace.npz")
