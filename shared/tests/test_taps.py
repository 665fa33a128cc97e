"""Taps of a kernel are restored from a file; errors name the field that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.safetensors import read_tensors, write_tensors
from paged_mla_shared.taps import Taps, load_taps, save_taps


def taps() -> Taps:
    parts: dict[str, Any] = {name: np.ones(2, np.float32) for name in ("highest", "total")}
    return Taps(
        token=3,
        head=1,
        keys=np.arange(5),
        scores=np.array([0, 1, np.nan, 3, np.inf], np.float32),
        spans=np.array([[0, 2], [3, 4]]),
        part_lse=np.ones(2, np.float32),
        part_out=np.ones((2, 7), np.float32),
        lse=np.array(2.5, np.float32),
        out=np.ones(7, np.float32),
        **parts,
    )


def test_they_come_back(tmp_path: Path):
    """All values are restored bit for bit, including NaN and inf."""
    save_taps(taps(), tmp_path / "x")
    found = load_taps(tmp_path / "x")
    assert (found.token, found.head) == (3, 1)
    for name in ("keys", "scores", "spans", "highest", "part_out", "lse", "out"):
        np.testing.assert_array_equal(getattr(found, name), getattr(taps(), name))


@pytest.mark.parametrize(
    ("arrays", "texts", "message"),
    [
        ({}, {"paged_mla_taps": "2"}, "paged_mla_taps.*'2'"),
        ({}, {"token": "-1"}, "token.*'-1'"),
        ({}, {"head": "9" * 40}, "head.*999"),
        ({"more": np.zeros(1)}, {}, "tensors.*more"),
        ({"lse": np.zeros(1, np.float32)}, {}, r"lse.*\(1,\).*float32 \[\]"),
        ({"keys": np.zeros(5, np.int32)}, {}, "keys.*int32.*int64"),
        ({"scores": np.zeros(4, np.float32)}, {}, "scores.*K = 4.*5"),
        ({"spans": np.zeros((2, 3), np.int64)}, {}, "spans.*2 = 3"),
    ],
)
def test_bad_files(tmp_path: Path, arrays: dict[str, Any], texts: dict[str, str], message: str):
    """The message has the file, the field and the allowed values."""
    path = tmp_path / "x"
    save_taps(taps(), path)
    good, said = read_tensors(path)
    write_tensors(path, good | arrays, said | texts)
    with pytest.raises(InvalidArgument, match=message):
        load_taps(path)
