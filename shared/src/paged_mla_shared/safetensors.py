"""Read and write files of named tensors in the safetensors format; files are untrusted.

A file is the length of its header (8 bytes, little-endian), the header, one JSON object, and the
bytes of the tensors, C-contiguous and little-endian, without gaps between them::

    {"__metadata__": {"key": "text"}, "name": {"dtype": "BF16", "shape": [2, 3],
     "data_offsets": [0, 12]}}

The safetensors library cannot load e4m3 into NumPy, and accepts a header with a duplicate name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.documents import LARGEST, check_file, parse_object
from paged_mla_shared.dtypes import NUMPY_DTYPES
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.strides import MOST_AXES, SHAPES, is_shape
from paged_mla_shared.typed import build

LARGEST_HEADER = LARGEST
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": NUMPY_DTYPES["float32"],
    "F16": NUMPY_DTYPES["float16"],
    "BF16": NUMPY_DTYPES["bfloat16"],
    "F8_E4M3": NUMPY_DTYPES["float8_e4m3"],
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Tensor:
    """The header's entry for one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InvalidArgument("dtype", repr(self.dtype[:30]), f"one of {', '.join(_DTYPES)}")
        if len(self.shape) > MOST_AXES:
            raise InvalidArgument("shape", f"{len(self.shape)} axes", f"at most {MOST_AXES} axes")
        if min(self.shape, default=0) < 0:
            raise InvalidArgument("shape", self.shape, "lengths >= 0")
        if not is_shape(self.shape, self.numpy_dtype.itemsize):
            raise InvalidArgument("shape", self.shape, SHAPES)
        begin, end = self.data_offsets
        if self.nbytes != end - begin:
            given = f"{end - begin} bytes"
            raise InvalidArgument("data_offsets", given, f"{self.nbytes} bytes, as for its shape")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def read_tensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors of a file, and its texts.

    Memory for tensors is allocated only after the header was compared with the file's size.

    Raises
    ------
    InvalidArgument
        The file is not a safetensors file, is damaged, or has an unknown element type.
    """
    check_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        header, start = _read_header(path, file, size)
        texts = build(dict[str, str], header.pop(_METADATA, {}), f"{path}: {_METADATA}")
        tensors = {name: build(_Tensor, t, f"{path}: {name!r}") for name, t in header.items()}
        _check_offsets(path, tensors, size - start)
        arrays = {}
        for name, tensor in tensors.items():
            file.seek(start + tensor.data_offsets[0])
            data = np.fromfile(file, np.uint8, tensor.nbytes)
            arrays[name] = data.view(tensor.numpy_dtype).reshape(tensor.shape)
    return arrays, texts


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> None:
    """Write tensors with any strides, and texts.

    Raises
    ------
    InvalidArgument
        A tensor has an unknown element type.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {_METADATA: dict(texts)}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in names:
            allowed = ", ".join(str(dtype) for dtype in names)
            raise InvalidArgument(name, f"dtype {array.dtype}", f"one of {allowed}")
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # aligns the first tensor
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for array in arrays.values():
            np.ascontiguousarray(array).tofile(file)


def _read_header(path: Path, file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset at which the bytes of tensors begin."""
    start = file.read(_LENGTH_BYTES)
    if len(start) < _LENGTH_BYTES:
        allowed = f"a safetensors file, of at least {_LENGTH_BYTES} bytes"
        raise InvalidArgument(str(path), f"{len(start)} bytes", allowed)
    length = int.from_bytes(start, "little")
    most = min(size - _LENGTH_BYTES, LARGEST_HEADER)
    if length > most:
        given = f"first {_LENGTH_BYTES} bytes that specify a header of {length} bytes"
        allowed = f"a safetensors file with a header of at most {most} bytes for this size"
        raise InvalidArgument(str(path), given, allowed)
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: header", error, "text in UTF-8") from error
    return parse_object(text, f"{path}: header"), _LENGTH_BYTES + length


def _check_offsets(path: Path, tensors: dict[str, _Tensor], size: int) -> None:
    """Check that tensors have no gaps and overlaps, and end at the end of the file."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.data_offsets[0] != end:
            given = f"data_offsets from byte {tensor.data_offsets[0]}"
            raise InvalidArgument(f"{path}: {name!r}", given, f"from byte {end}, without a gap")
        end = tensor.data_offsets[1]
    if end != size:
        raise InvalidArgument(str(path), f"{size} bytes of tensors", f"{end}, as in the header")
