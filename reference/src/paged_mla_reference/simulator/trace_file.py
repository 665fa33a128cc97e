"""A trace as a file: for implementations that do not run the simulator.

Version 1 is an ``.npz``: a zip of ``.npy`` arrays that ``numpy.load`` opens, one array at a
time. ``header.json`` comes first::

    {"version": 1, "name": ..., "world": ..., "problems": {"causal": {...}, "tree": {...}}}

with problems spelled as their fields. Every step is a folder ``000000000``, ``000000001``, ... with

* ``step.json``: ``number``, ``rank``, ``mask`` and, for each token of a real row, ``tokens`` as
  ``[request, kind, index]``;
* the batch's arrays under their names, absent where the batch has ``None``;
* ``exact_out``, ``exact_lse``: the exact answer, float64;
* ``score_bound``, ``value_bound``: how large the numbers were on the way to it, float64;
* ``rounded_out``, ``rounded_lse``: the answer rounded where the rules round.

``q_nope``, ``q_pe``, ``ckv``, ``k_pe`` and ``rounded_out`` are bit patterns, unsigned integers of
the width of the problem's dtype. Caches are all poison before the first step, and carry over
from a rank's step to its next one, whatever the mask.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.attention import Answer
from paged_mla_reference.rounding import round_to, widen
from paged_mla_reference.simulator.trace import Token, Trace, TraceStep
from paged_mla_shared.dtypes import bits, numpy_dtype
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Batch, Mask
from paged_mla_shared.stored import problem_from_json

VERSION = 1
_AS_BITS = ("q_nope", "q_pe", "ckv", "k_pe")
_ARRAYS = (*_AS_BITS, "cu_seqlens_q", "seq_lens", "block_table", "mask", "slot_mapping")
_EXPECTED = (
    "exact_out", "exact_lse", "score_bound", "value_bound", "rounded_out", "rounded_lse",
)  # fmt: skip


def save_trace(trace: Trace, steps: Iterable[TraceStep], path: Path) -> None:
    """Write a trace step by step; no two steps are held at once."""
    problems = {str(mask): asdict(problem) for mask, problem in trace.problems.items()}
    header = {"version": VERSION, "name": trace.name, "world": trace.world, "problems": problems}
    dtype = trace.problems[Mask.CAUSAL].dtype
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("header.json", json.dumps(header))
        for folder, step in enumerate(steps):
            about = {
                "number": step.number,
                "rank": step.rank,
                "mask": str(step.mask),
                "tokens": [[token.request, token.kind, token.index] for token in step.tokens],
            }
            archive.writestr(f"{folder:09}/step.json", json.dumps(about))
            for name, array in _arrays(step, dtype).items():
                with archive.open(f"{folder:09}/{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def load_trace(path: Path) -> tuple[Trace, Iterator[TraceStep]]:
    """Return a trace and its steps; each is read when it is asked for.

    Raises
    ------
    InvalidArgument
        The file is of another version.
    """
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
    if header["version"] != VERSION:
        raise InvalidArgument("version", header["version"], f"{VERSION}")
    problems = {Mask(mask): problem_from_json(p) for mask, p in header["problems"].items()}
    trace = Trace(header["name"], problems, header["world"])
    return trace, _steps(path, problems[Mask.CAUSAL].dtype)


def _steps(path: Path, dtype: str) -> Iterator[TraceStep]:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        for folder in sorted({name.split("/")[0] for name in names if "/" in name}):
            about = json.loads(archive.read(f"{folder}/step.json"))
            arrays = {}
            for name in (*_ARRAYS, *_EXPECTED):
                if f"{folder}/{name}.npy" in names:
                    with archive.open(f"{folder}/{name}.npy") as file:
                        arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
            yield _step(about, arrays, dtype)


def _arrays(step: TraceStep, dtype: str) -> dict[str, NDArray[Any]]:
    arrays = {n: getattr(step.batch, n) for n in _ARRAYS if getattr(step.batch, n) is not None}
    arrays |= {name: bits(np.ascontiguousarray(arrays[name])) for name in _AS_BITS}
    return arrays | {
        "exact_out": step.exact.out,
        "exact_lse": step.exact.lse,
        "score_bound": step.exact.score_bound,
        "value_bound": step.exact.value_bound,
        "rounded_out": bits(round_to(step.rounded.out, dtype)),
        "rounded_lse": step.rounded.lse,
    }


def _step(about: dict[str, Any], arrays: dict[str, NDArray[Any]], dtype: str) -> TraceStep:
    for name in (*_AS_BITS, "rounded_out"):
        arrays[name] = arrays[name].view(numpy_dtype(dtype))
    bounds = arrays["score_bound"], arrays["value_bound"]
    return TraceStep(
        number=about["number"],
        rank=about["rank"],
        mask=Mask(about["mask"]),
        batch=Batch(**{name: arrays[name] for name in _ARRAYS if name in arrays}),
        exact=Answer(arrays["exact_out"], arrays["exact_lse"], *bounds),
        rounded=Answer(widen(arrays["rounded_out"]), arrays["rounded_lse"], *bounds),
        tokens=tuple(Token(*token) for token in about["tokens"]),
    )
