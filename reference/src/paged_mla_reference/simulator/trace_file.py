"""A trace as a file: for implementations that do not run the simulator.

Version 2 is an ``.npz``: a zip of ``.npy`` arrays, version 1.0 and C-contiguous, that
``numpy.load`` opens, one array at a time. ``header.json`` comes first::

    {"version": 2, "name": ..., "world": ..., "problems": {"causal": {...}, "tree": {...}}}

with problems spelled as their fields. Every step is a folder ``000000000``, ``000000001``, ... with

* ``step.json``: ``number``, ``rank``, ``mask`` and, for each token of a real row, ``tokens`` as
  ``[request, kind, index]``;
* the batch's arrays under their names, absent where the batch has ``None``;
* ``exact_out``, ``exact_lse``: the exact answer, float64;
* ``score_bound``, ``value_bound``, ``turn_error``: how large the numbers were on the way to it, and
  what rounding one rotated element otherwise moves a score by, float64;
* ``rounded_out``, ``rounded_lse``: the answer rounded where the rules round.

``q_nope``, ``q_pe``, ``ckv``, ``k_pe`` and ``rounded_out`` are bit patterns, unsigned integers of
the width of the problem's dtype. Caches are all poison before the first step, and carry over
from a rank's step to its next one, whatever the mask.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.parallel import ContextParallel
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.rules.validation.inputs import validate_batch, validate_problem
from paged_mla_reference.simulator.archive import LARGEST_ARRAYS, open_archive
from paged_mla_reference.simulator.trace import Token, Trace, TraceStep
from paged_mla_shared.documents import take_version
from paged_mla_shared.dtypes import bits, numpy_dtype
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Batch, Mask, Problem
from paged_mla_shared.typed import build

VERSION = 2
_AS_BITS = ("q_nope", "q_pe", "ckv", "k_pe")
_ARRAYS = (*_AS_BITS, "cu_seqlens_q", "seq_lens", "block_table", "mask", "slot_mapping")
_BOUNDS = ("score_bound", "value_bound", "turn_error")
_EXPECTED = ("exact_out", "exact_lse", *_BOUNDS, "rounded_out", "rounded_lse")


def check_writable(trace: Trace) -> None:
    """Check that the answers of a trace are known.

    Raises
    ------
    InvalidArgument
        Tokens of the cache share scales: what a request sees depends on more than itself.
    """
    for problem in trace.problems.values():
        if problem.layout.format.couples_tokens:
            allowed = "formats that cache a token the same whatever is cached beside it"
            raise InvalidArgument("cache_format", problem.cache_format, allowed)


def save_trace(trace: Trace, steps: Iterable[TraceStep], path: Path) -> None:
    """Write a trace step by step; no two steps are held at once.

    Raises
    ------
    InvalidArgument
        No answers are known, or a step is larger than a reader takes.
    """
    check_writable(trace)
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
            arrays = _arrays(step, dtype)
            size = sum(array.nbytes for array in arrays.values())
            if size > LARGEST_ARRAYS:
                given = f"{size} bytes of arrays in step {step.number}"
                raise InvalidArgument(str(path), given, f"at most {LARGEST_ARRAYS}")
            archive.writestr(f"{folder:09}/step.json", json.dumps(about))
            for name, array in arrays.items():
                with archive.open(f"{folder:09}/{name}.npy", "w") as file:
                    contiguous = np.ascontiguousarray(array)
                    np.lib.format.write_array(file, contiguous, (1, 0), allow_pickle=False)


def load_trace(path: Path) -> tuple[Trace, Iterator[TraceStep]]:
    """Return a trace and its steps; each is read and checked when it is asked for.

    Raises
    ------
    InvalidArgument
        The file is no trace of this version. Errors in a step come with that step.
    """
    where = f"{path}: header.json"
    with open_archive(path) as archive:
        fields = archive.read_object("header.json")
    take_version(fields, "version", VERSION, where)
    header: _Header = build(_Header, fields, where)
    return Trace(header.name, header.problems, header.world), _steps(path, header)


@dataclass(frozen=True)
class _Header:
    name: str
    world: int
    problems: dict[Mask, Problem]

    def __post_init__(self) -> None:
        ContextParallel(self.world)
        if Mask.CAUSAL not in self.problems:
            raise InvalidArgument("problems", "no causal one", "causal, and tree or not")
        for mask, problem in self.problems.items():
            if (problem.mask, problem.dtype) != (mask, self.dtype):
                allowed = f"mask {mask} and dtype {self.dtype}"
                given = f"mask {problem.mask} and dtype {problem.dtype}"
                raise InvalidArgument(f"problems.{mask}", given, allowed)
            validate_problem(problem)

    @property
    def dtype(self) -> str:
        return self.problems[Mask.CAUSAL].dtype


@dataclass(frozen=True)
class _About:
    """What ``step.json`` says."""

    number: int
    rank: int
    mask: Mask
    tokens: tuple[tuple[str, str, int], ...]


def _steps(path: Path, header: _Header) -> Iterator[TraceStep]:
    with open_archive(path) as archive:
        steps: dict[str, list[str]] = {}
        for name in sorted(archive.names - {"header.json"}):
            steps.setdefault(name.partition("/")[0], []).append(name)
        for number, (folder, members) in enumerate(steps.items()):
            where = f"{path}: {folder}"
            if folder != f"{number:09}":
                raise InvalidArgument(where, "no step", f"the folder {number:09}")
            about = build(_About, archive.read_object(f"{folder}/step.json"), f"{where}/step.json")
            known = {f"{folder}/{name}.npy": name for name in (*_ARRAYS, *_EXPECTED)}
            if unknown := set(members) - known.keys() - {f"{folder}/step.json"}:
                raise InvalidArgument(f"{path}: {min(unknown)!r}", "a member", ", ".join(known))
            given = {member: name for member, name in known.items() if member in members}
            arrays = archive.read_arrays(given)
            try:
                step = _step(header, about, arrays)
            except InvalidArgument as error:
                raise error.inside(where) from None
            yield step


def _arrays(step: TraceStep, dtype: str) -> dict[str, NDArray[Any]]:
    arrays = {n: getattr(step.batch, n) for n in _ARRAYS if getattr(step.batch, n) is not None}
    arrays |= {name: bits(np.ascontiguousarray(arrays[name])) for name in _AS_BITS}
    return arrays | {
        "exact_out": step.exact.out,
        "exact_lse": step.exact.lse,
        **{name: getattr(step.exact, name) for name in _BOUNDS},
        "rounded_out": bits(round_to(step.rounded.out, dtype)),
        "rounded_lse": step.rounded.lse,
    }


def _step(header: _Header, about: _About, arrays: dict[str, NDArray[Any]]) -> TraceStep:
    if about.mask not in header.problems or not 0 <= about.rank < header.world:
        given = f"mask {about.mask}, rank {about.rank}"
        raise InvalidArgument("step.json", given, f"a problem's mask, a rank of {header.world}")
    if missing := {*_ARRAYS, *_EXPECTED} - arrays.keys() - {"mask", "slot_mapping"}:
        raise InvalidArgument(f"{min(missing)}.npy", "nothing", "a member: it is required")
    dtype = numpy_dtype(header.dtype)
    for name in (*_AS_BITS, "rounded_out"):
        unsigned = bits(np.zeros(0, dtype)).dtype
        if arrays[name].dtype != unsigned:
            raise InvalidArgument(name, arrays[name].dtype, f"{unsigned}, bits of {header.dtype}")
        arrays[name] = arrays[name].view(dtype)
    batch = Batch(**{name: arrays[name] for name in _ARRAYS if name in arrays})
    validate_batch(header.problems[about.mask], batch)
    _check_expected(batch, arrays)
    if len(about.tokens) > batch.num_tokens:
        given = f"{len(about.tokens)} tokens"
        raise InvalidArgument("step.json: tokens", given, f"at most {batch.num_tokens}")
    bounds = [arrays[name] for name in _BOUNDS]
    return TraceStep(
        number=about.number,
        rank=about.rank,
        mask=about.mask,
        batch=batch,
        exact=Answer(arrays["exact_out"], arrays["exact_lse"], *bounds),
        rounded=Answer(widen(arrays["rounded_out"]), arrays["rounded_lse"], *bounds),
        tokens=tuple(Token(*token) for token in about.tokens),
    )


def _check_expected(batch: Batch, arrays: dict[str, NDArray[Any]]) -> None:
    tokens, heads, _ = batch.q_nope.shape
    shapes = {
        "exact_out": batch.q_nope.shape,
        "exact_lse": (tokens, heads),
        **dict.fromkeys(_BOUNDS, (tokens, heads)),
        "rounded_out": batch.q_nope.shape,
        "rounded_lse": (tokens, heads),
    }
    for name, shape in shapes.items():
        array = arrays[name]
        dtype = batch.q_nope.dtype if name == "rounded_out" else np.dtype(np.float64)
        if (array.dtype, array.shape) != (dtype, shape):
            given = f"{array.dtype} {array.shape}"
            raise InvalidArgument(name, given, f"{dtype} {shape}")
