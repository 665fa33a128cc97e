"""Untrusted files of tensors are read exactly; errors name the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ci.installed import import_or_skip

from paged_mla_shared.dtypes import NUMPY_DTYPES, bits, numpy_dtype
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.safetensors import LARGEST_HEADER, read_tensors, write_tensors

MATRIX = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
TYPES = (*NUMPY_DTYPES.values(), *map(np.dtype, ("bool", "uint8", "int32", "int64", "float64")))


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def with_matrix(**fields: object) -> dict[str, object]:
    return {"x": MATRIX | fields}


BAD = {
    "empty": (b"", "8 bytes"),
    "header past the end": (file_of({}, length=100), "header of 100 bytes"),
    "huge header": (file_of({}, length=2**63), "header of"),
    "no json": (file_of(b"{"), "one JSON object"),
    "deep": (file_of(b'{"a":' * 40_000), "nested too deeply"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "no object": (file_of({"x": 3}), "'x'"),
    "unknown field": (file_of(with_matrix(more=1), bytes(24)), "'x'.*unknown field"),
    "unknown type": (file_of(with_matrix(dtype="F8_E5M2"), bytes(24)), "'x'.*F8_E5M2"),
    "negative": (file_of(with_matrix(shape=[-2, -3]), bytes(24)), "'x'.*lengths >= 0"),
    "true": (file_of(with_matrix(shape=[True, 6]), bytes(24)), "'x'.*integer"),
    "axes": (file_of(with_matrix(shape=[1] * 33), bytes(24)), "'x'.*at most 8 axes"),
    "size": (file_of(with_matrix(shape=[2, 4]), bytes(24)), "'x'.*32 bytes"),
    "overflow": (file_of(with_matrix(shape=[2**40, 2**40]), bytes(24)), "'x'"),
    "empty and huge": (file_of(with_matrix(shape=[0, 2**62], data_offsets=[0, 0])), "'x': shape"),
    "past the end": (file_of(with_matrix(), bytes(23)), "23 bytes"),
    "backwards": (file_of(with_matrix(data_offsets=[24, 0]), bytes(24)), "'x'"),
    "gap": (file_of(with_matrix(data_offsets=[8, 32]), bytes(32)), "'x'.*byte 0"),
    "overlap": (file_of({"x": MATRIX, "y": MATRIX}, bytes(24)), "byte 24"),
    "left over": (file_of({"x": MATRIX}, bytes(25)), "25 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str):
    """Every error names the file, and the tensor if one tensor is wrong."""
    content, message = BAD[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"bad\.safetensors.*{message}"):
        read_tensors(path)


def test_a_header_is_bounded(tmp_path: Path):
    """A file may be large, but its header may not."""
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((LARGEST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(LARGEST_HEADER + 100)
    with pytest.raises(InvalidArgument, match=f"at most {LARGEST_HEADER}"):
        read_tensors(path)


def test_no_file(tmp_path: Path):
    """A folder raises."""
    with pytest.raises(InvalidArgument, match="allowed: a regular file"):
        read_tensors(tmp_path)


def test_every_type_comes_back(tmp_path: Path):
    """Bits, shapes and texts are restored, for any type and any number of axes."""
    rng = np.random.default_rng(0)
    arrays = {
        f"{dtype}-{len(shape)}": rng.integers(0, 2, (*shape, dtype.itemsize), np.uint8)
        .view(dtype)
        .reshape(shape)
        for dtype in TYPES
        for shape in ((), (0, 4), (3,), (2, 3, 5))
    }
    arrays["strided"] = np.arange(24, dtype=np.int64).reshape(4, 6)[::2, ::3]
    path = tmp_path / "all.safetensors"
    write_tensors(path, arrays, {"why": "a test", "ü": "é"})
    found, metadata = read_tensors(path)
    assert metadata == {"why": "a test", "ü": "é"}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_the_library_agrees(tmp_path: Path):
    """The safetensors library reads the written file, with bfloat16 and e4m3 by their names."""
    library = import_or_skip("safetensors")
    arrays = {
        name: np.arange(6).astype(numpy_dtype(name)).reshape(2, 3)
        for name in ("bfloat16", "float8_e4m3", "float32")
    }
    path = tmp_path / "x.safetensors"
    write_tensors(path, arrays, {})
    theirs = dict(library.deserialize(path.read_bytes()))
    assert {name: t["dtype"] for name, t in theirs.items()} == {
        "bfloat16": "BF16",
        "float8_e4m3": "F8_E4M3",
        "float32": "F32",
    }
    for name, array in arrays.items():
        assert theirs[name]["shape"] == [2, 3]
        assert bytes(theirs[name]["data"]) == bits(array).tobytes()
