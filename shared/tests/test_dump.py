"""Dumps of steps: all fields are restored, and errors name the field that is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged_mla_shared.dims import SMALL
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.dump import FIELDS, Dump, load_dump, save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Problem, Rope, RopePairing, Yarn
from paged_mla_shared.safetensors import read_tensors, write_tensors
from paged_mla_shared.strides import memory_of

PROBLEM = Problem(
    dims=SMALL,
    dtype="bfloat16",
    cache_format="bf16",
    block_size=4,
    num_blocks=9,
    max_rows=2,
    max_query_tokens=3,
    max_model_len=8,
    softmax_scale=0.25,
    rope=Rope(RopePairing.NEOX, yarn=Yarn(40.0, 4096)),
)
SIZES = {"B": 2, "B+1": 3, "T": 3, "M": 2, "N": 5, "S": 2, "K": 7, "X": 6, "P": 4}
SIZES |= {"Bp+1": 4, "Tq": 5, "Tk": 8}


def full(problem: Problem = PROBLEM) -> Dump:
    """Return a dump with every field, filled with ones."""
    arrays = {}
    for name, field in FIELDS.items():
        known = field.shape(problem)
        if known is not None:
            shape = tuple(SIZES[axis] if isinstance(axis, str) else axis for axis in known)
            arrays[name] = np.ones(shape, field.numpy_dtype(problem))
    return Dump(problem=problem, arrays=arrays, origin="layer 3, step 17", lse_base="2")


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_dump_comes_back(tmp_path: Path, cache_format: str):
    """All fields are restored bit for bit, in every cache format."""
    dtype = FORMATS[cache_format].ckv_dtype
    dtype = "bfloat16" if dtype == "float8_e4m3" else dtype
    dump = full(replace(PROBLEM, cache_format=cache_format, dtype=dtype))
    save_dump(dump, tmp_path / "x.safetensors")
    found = load_dump(tmp_path / "x.safetensors")
    assert (found.problem, found.origin, found.lse_base) == (
        dump.problem,
        "layer 3, step 17",
        "2",
    )
    assert found.arrays.keys() == dump.arrays.keys()
    for name, array in dump.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_rows_of_a_cache_are_of_its_type():
    """A dump has a cache's elements in their own type, not as bytes."""
    plain, codes, rows = (
        full(replace(PROBLEM, cache_format=name)).arrays["cache_after"]
        for name in ("bf16", "fp8_e4m3", "fp8_ds_mla")
    )
    assert plain.dtype == numpy_dtype("bfloat16")
    assert codes.dtype == numpy_dtype("float8_e4m3")
    assert rows.dtype == np.uint8


def test_every_field_is_optional(tmp_path: Path):
    """A dump without any tensor is valid."""
    save_dump(Dump(problem=PROBLEM, arrays={}), tmp_path / "x.safetensors")
    assert not load_dump(tmp_path / "x.safetensors").arrays


def test_a_file_is_of_the_earliest_version_that_has_its_fields(tmp_path: Path):
    """A file gets the earliest version that has its fields, and may not have later fields."""
    path = tmp_path / "x.safetensors"
    problem = {"problem": json.dumps(asdict(PROBLEM))}
    for name, version in (("seq_lens", "1"), ("prefill_lse", "2"), ("query_codes", "2")):
        save_dump(Dump(problem=PROBLEM, arrays={name: full().arrays[name]}), path)
        assert read_tensors(path)[1]["paged_mla_dump"] == version
        write_tensors(path, {name: full().arrays[name]}, problem | {"paged_mla_dump": "1"})
        if version == "1":
            load_dump(path)
            continue
        with pytest.raises(InvalidArgument, match=f"{name}.*version 1.*version 2"):
            load_dump(path)


def test_views_keep_the_memory_between_elements(tmp_path: Path):
    """Tensors that are views are restored with their strides and the memory between elements."""
    path = tmp_path / "x.safetensors"
    lines = np.arange(3 * 48).reshape(3, 48).astype(numpy_dtype("bfloat16"))
    dump = replace(full(), arrays=full().arrays | {"ckv": lines[:, :32], "k_pe": lines[:, 32:]})
    save_dump(dump, path)
    assert read_tensors(path)[1]["paged_mla_dump"] == "3"
    found = load_dump(path).arrays
    for name in ("ckv", "k_pe"):
        assert found[name].strides == dump.arrays[name].strides
        np.testing.assert_array_equal(found[name], dump.arrays[name])
    np.testing.assert_array_equal(memory_of(found["ckv"]), lines.ravel()[: 2 * 48 + 32])


@pytest.mark.parametrize(
    ("version", "views", "message"),
    [
        ("3", {"seq_lens": {"shape": [3], "strides": [1]}}, "seq_lens: got shape"),
        ("3", {"outs": {"shape": [3], "strides": [1]}}, "views: got 'outs'"),
        ("2", {"seq_lens": {"shape": [2], "strides": [1]}}, "views.*version 3"),
        ("3", {"seq_lens": {"shape": [1]}}, "views.*strides"),
    ],
)
def test_bad_views(tmp_path: Path, version: str, views: dict[str, object], message: str):
    """Views exceed a tensor, name no tensor, are not in the version, or lack strides."""
    path = tmp_path / "x.safetensors"
    texts = {"paged_mla_dump": version, "problem": json.dumps(asdict(PROBLEM))}
    write_tensors(path, {"seq_lens": np.ones(2, np.int32)}, texts | {"views": json.dumps(views)})
    with pytest.raises(InvalidArgument, match=message):
        load_dump(path)


def wrong(name: str, array: np.ndarray) -> Dump:
    dump = full()
    return replace(dump, arrays=dump.arrays | {name: array})


BAD = {
    "a name": (wrong("outs", np.zeros(3)), "'outs'.*unknown field"),
    "a type": (wrong("seq_lens", np.zeros(2, np.int64)), "seq_lens.*int64.*int32"),
    "no entry": (
        wrong("cu_seqlens_q", np.zeros(0, np.int32)),
        r"cu_seqlens_q.*an empty axis.*\[B\+1\]",
    ),
    "axes": (wrong("lse", np.zeros(3, np.float32)), "lse.*1 axes"),
    "dims": (wrong("lse", np.zeros((3, 5), np.float32)), r"lse.*\(3, 5\).*\[T, 4\]"),
    "another size": (wrong("lse", np.zeros((2, 4), np.float32)), "lse.*T = 2.*3"),
    "another B": (wrong("seq_lens", np.ones(3, np.int32)), "B = "),
    "no scales": (
        wrong("scales_after", np.ones((5, 4), np.float32)),
        "scales_after.*bf16",
    ),
    "a base": (replace(full(), lse_base="10"), "lse_base.*'10'"),
    "products": (replace(full(), products="slow"), "products.*'slow'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_dumps(tmp_path: Path, name: str):
    """An invalid dump is not written; the error names the field."""
    dump, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        save_dump(dump, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "paged_mla_dump"),
        ({"paged_mla_dump": "4"}, "paged_mla_dump.*'4'"),
        ({"paged_mla_dump": "1"}, "problem"),
        ({"paged_mla_dump": "1", "problem": "[]"}, "problem.*list"),
        ({"paged_mla_dump": "1", "problem": "{}"}, "problem: dims"),
        ({"paged_mla_dump": "1", "problem": json.dumps(asdict(PROBLEM)), "x": ""}, "'x'"),
    ],
)
def test_bad_headers(tmp_path: Path, texts: dict[str, str], message: str):
    """A file of tensors without the texts of a dump raises."""
    write_tensors(tmp_path / "x.safetensors", {}, texts)
    with pytest.raises(InvalidArgument, match=rf"x\.safetensors.*{message}"):
        load_dump(tmp_path / "x.safetensors")


def test_a_bad_format_is_named(tmp_path: Path):
    """S-11: formats and types are checked before sizes are computed from them."""
    for field, value in (("cache_format", "fp4"), ("dtype", "int4")):
        problem = asdict(PROBLEM) | {field: value}
        texts = {"paged_mla_dump": "1", "problem": json.dumps(problem)}
        write_tensors(tmp_path / "x.safetensors", {"lse": np.zeros((1, 4), np.float32)}, texts)
        with pytest.raises(InvalidArgument, match=f"{field}.*{value}"):
            load_dump(tmp_path / "x.safetensors")


def test_the_page_has_every_field():
    """The documentation has exactly the fields of a dump."""
    page = (Path(__file__).parents[1] / "docs" / "dump.md").read_text()
    tables = re.findall(r"\| tensor \|.+?\n\n", page, re.DOTALL)
    lines = [line for table in tables for line in table.splitlines()[2:] if line]
    cells = [line.split("|")[1] for line in lines]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == FIELDS.keys()


def test_the_example_of_the_page_writes_a_dump(tmp_path: Path):
    """The code of the page runs unchanged."""
    page = (Path(__file__).parents[1] / "docs" / "dump.md").read_text()
    [code] = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    example: dict[str, Any] = {}
    exec(code, example)
    q_nope = np.ones((1, 16, 512), numpy_dtype("bfloat16"))
    example["write"](
        tmp_path / "x.safetensors", 64, 9, 0.1, q_nope=q_nope, seq_lens=np.ones(1, np.int32)
    )
    assert load_dump(tmp_path / "x.safetensors").problem.dims.num_heads == 16
