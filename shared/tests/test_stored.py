"""The stored vectors and their NumPy reader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.manifest import read_manifest
from paged_mla_shared.stored import FOLDER, load_vector, vector_ids


@pytest.mark.parametrize("vector_id", vector_ids())
def test_a_vector_is_whole(vector_id: str):
    """Arrays have the shapes that the problem implies."""
    vector = load_vector(vector_id)
    problem, batch = vector.problem, vector.batch
    tokens, heads = batch.num_tokens, problem.dims.num_heads
    assert vector.out.shape == (tokens, heads, problem.dims.kv_lora_rank)
    assert vector.lse.shape == vector.lse_budget.shape == (tokens, heads)
    assert vector.before.blocks.shape == (len(vector.before.block_ids), problem.layout.block_bytes)
    assert vector.metadata.positions.shape == (tokens,)
    assert np.isfinite(vector.out).all()


def test_every_file_is_listed():
    """The manifest lists every file of the folder."""
    listed = {entry.file for entry in read_manifest(FOLDER).values()}
    assert {path.name for path in FOLDER.glob("*.bin")} == listed
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2**20


TREE = "masks-tree-full-ragged-padded-fp32"
BAD = {
    "format-unknown": (("format",), 2, "format: got 2"),
    "format-missing": (("format",), ..., "format: got None"),
    "byte-order": (("byte_order",), "big", "byte_order"),
    "no-vectors": (("vectors",), ..., "vectors"),
    "vectors-object": (("vectors",), {}, "vectors"),
    "vector-list": (("vectors", 0), [], r"vectors\[0\]|vectors: \[0\]"),
    "id-number": (("vectors", 0, "id"), 3, "id: got 3"),
    "id-twice": (("vectors", 1, "id"), TREE, "a duplicate id"),
    "file-of-the-parent": (("vectors", 0, "file"), "../vector.bin", "file: got '../vector.bin'"),
    "file-absolute": (("vectors", 0, "file"), "/etc/passwd", "file: got '/etc/passwd'"),
    "file-the-parent": (("vectors", 0, "file"), "..", "file"),
    "file-missing": (("vectors", 0, "file"), "nothing.bin", "nothing.bin"),
    "file-a-folder": (("vectors", 0, "file"), "folder", "a regular file"),
    "unknown-field": (("vectors", 0, "dtype"), "float32", "unknown field 'dtype'"),
    "format-of-cache": (("vectors", 0, "problem", "cache_format"), "int4", "cache_format"),
    "dtype-of-problem": (("vectors", 0, "problem", "dtype"), "float8", "dtype"),
    "heads-negative": (("vectors", 0, "problem", "dims", "num_heads"), -1, "q_nope"),
    "heads-1e12": (("vectors", 0, "problem", "dims", "num_heads"), 10**12, "q_nope"),
    "mask-unknown": (("vectors", 0, "problem", "mask"), "none", "mask: got 'none'"),
    "scale-nan": (("vectors", 0, "problem", "softmax_scale"), float("nan"), "NaN"),
    "array-missing": (("vectors", 0, "arrays", 0), ..., "no cu_seqlens_q"),
    "array-unknown": (("vectors", 0, "arrays", 0, "name"), "cu", "no cu_seqlens_q"),
    "array-twice": (("vectors", 0, "arrays", 0, "name"), "seq_lens", "a duplicate name"),
    "dtype-object": (("vectors", 0, "arrays", 0, "dtype"), "object", "dtype: got 'object'"),
    "dtype-other": (("vectors", 0, "arrays", 0, "dtype"), "int64", "cu_seqlens_q"),
    "shape-negative": (("vectors", 0, "arrays", 0, "shape"), [-1], "shape"),
    "shape-1e12": (("vectors", 0, "arrays", 0, "shape"), [10**12], "cu_seqlens_q"),
    "shape-empty-and-huge": (("vectors", 0, "arrays", 2, "shape"), [0, 2**62], "shape: got"),
    "shape-float": (("vectors", 0, "arrays", 0, "shape"), [9.0], "shape"),
    "shape-scalar": (("vectors", 0, "arrays", 0, "shape"), [], "cu_seqlens_q"),
    "offset-negative": (("vectors", 0, "arrays", 0, "offset"), -4, "offset"),
    "offset-past-the-file": (("vectors", 0, "arrays", 0, "offset"), 10**12, "end of the file"),
}


@pytest.mark.parametrize(("place", "value", "match"), BAD.values(), ids=BAD)
def test_a_bad_manifest(tmp_path: Path, place, value, match: str):
    """The error names file, entry and field; no file outside the folder is opened."""
    folder = tmp_path / "vectors"
    shutil.copytree(FOLDER, folder)
    (folder / "folder").mkdir()
    (tmp_path / "vector.bin").write_bytes(b"")
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    document["vectors"].sort(key=lambda entry: entry["id"] != TREE)
    at = document
    for step in place[:-1]:
        at = at[step]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidArgument, match=match) as caught:
        load_vector(TREE, folder)
    assert str(folder) in str(caught.value)


def test_a_short_file(tmp_path: Path):
    """The error names an array that exceeds the file."""
    folder = tmp_path / "vectors"
    shutil.copytree(FOLDER, folder)
    with (folder / f"{TREE}.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(InvalidArgument, match="'q_nope': got an end at byte"):
        load_vector(TREE, folder)


def test_an_unknown_vector():
    """The error lists the known ids."""
    with pytest.raises(InvalidArgument, match=TREE):
        load_vector("decode")
