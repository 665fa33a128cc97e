"""Reading of untrusted zip archives of arrays: sizes are checked before a member is unpacked."""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.documents import LARGEST, check_file, parse_object
from paged_mla_shared.errors import InvalidArgument

LARGEST_ARRAYS = 1 << 30  # most bytes of arrays that one call reads

_MAGIC = b"\x93NUMPY\x01\x00"
_DTYPES = {text: np.dtype(text) for text in ("|b1", "|u1", "<u2", "<u4", "<i4", "<i8", "<f8")}
_HEADER = re.compile(
    rb"\{'descr': '([|<]\w\d)', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,12}, ){0,3}(?:\d{1,12},?)?)\), \} *\n"
)


@dataclass(frozen=True)
class Archive:
    """An open archive; every error names the file and the member."""

    path: Path
    _zip: zipfile.ZipFile

    @property
    def names(self) -> set[str]:
        """Names of all members that are not folders."""
        return {name for name in self._zip.namelist() if not name.endswith("/")}

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON member."""
        where = f"{self.path}: {name}"
        if self._size(name) > LARGEST:
            raise InvalidArgument(where, f"{self._size(name)} bytes", f"at most {LARGEST} bytes")
        with self._open(name) as file:
            return parse_object(file.read().decode(), where)

    def read_arrays(self, members: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """Return the arrays of ``.npy`` members.

        Parameters
        ----------
        members : mapping of str to str
            The name of each member, and the key of its array in the result.

        Raises
        ------
        InvalidArgument
            The arrays are larger than ``LARGEST_ARRAYS`` bytes, or a member is not exactly one
            C-contiguous, little-endian array of numbers.
        """
        total = sum(self._size(name) for name in members)
        if total > LARGEST_ARRAYS:
            given = f"{total} bytes of arrays in {next(iter(members))} and the members next to it"
            raise InvalidArgument(str(self.path), given, f"at most {LARGEST_ARRAYS} bytes")
        return {called: self._read_array(name) for name, called in members.items()}

    def _read_array(self, name: str) -> NDArray[Any]:
        with self._open(name) as file:
            start = file.read(len(_MAGIC) + 2)
            header = file.read(int.from_bytes(start[len(_MAGIC) :], "little"))
            found = _HEADER.fullmatch(header)
            dtype = _DTYPES.get(found[1].decode()) if found else None
            if not start.startswith(_MAGIC) or found is None or dtype is None:
                allowed = f"npy 1.0, C-contiguous, one of {', '.join(_DTYPES)}"
                raise InvalidArgument(f"{self.path}: {name}", repr(header[:80]), allowed)
            shape = tuple(int(axis) for axis in found[2].split(b",") if axis.strip())
            size, have = math.prod(shape) * dtype.itemsize, self._size(name)
            if len(start) + len(header) + size != have:
                given = f"{dtype} {shape} in {have} bytes"
                raise InvalidArgument(
                    f"{self.path}: {name}", given, "an array with exactly the size of its member"
                )
            return np.frombuffer(file.read(size), dtype).reshape(shape).copy()

    def _size(self, name: str) -> int:
        """Return the unpacked size of a member in bytes, or 0 if there is no such member."""
        return self._zip.NameToInfo[name].file_size if name in self._zip.NameToInfo else 0

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        where = f"{self.path}: {name}"
        if name not in self._zip.NameToInfo:
            raise InvalidArgument(where, "nothing", "a member with this name")
        kind = self._zip.NameToInfo[name].compress_type
        if kind not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise InvalidArgument(where, f"compression {kind}", "stored or deflated")
        with _naming(where), self._zip.open(name) as file:
            yield file


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a zip file.

    Raises
    ------
    InvalidArgument
        The file cannot be read, is not a zip file, or has two members with the same name.
    """
    check_file(path)
    with _naming(str(path)):
        archive = zipfile.ZipFile(path)
    with archive:
        if len(archive.namelist()) != len(archive.NameToInfo):
            raise InvalidArgument(str(path), "two members with the same name", "distinct names")
        yield Archive(path, archive)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Convert errors of zip files to ``InvalidArgument`` errors that name the place."""
    try:
        yield
    except InvalidArgument:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise InvalidArgument(where, error, "an undamaged zip file") from error
