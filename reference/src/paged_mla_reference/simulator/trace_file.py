"""The file format of a trace, for implementations that do not run the simulator.

Version 2 is an ``.npz`` file: a zip of JSON files and of C-contiguous ``.npy`` arrays, version 1.0.
``numpy.load`` opens it and reads one array at a time. The first member is ``header.json``::

    {"version": 2, "name": ..., "world": ..., "problems": {"causal": {...}, "tree": {...}}}

Each problem is an object of the fields of ``Problem``. Every step is a folder ``000000000``,
``000000001``, ... with these members:

* ``step.json``: ``number``, ``rank``, ``mask``, and ``tokens`` with ``[request, kind, index]`` for
  each token of a real row;
* the batch's arrays under their names; an array that is ``None`` in the batch is absent;
* ``exact_out``, ``exact_lse``: the exact output, float64;
* ``score_bound``, ``value_bound``, ``turn_error``: the bounds of
  :class:`~paged_mla_reference.rules.attention.Answer` for error budgets, float64;
* ``rounded_out``, ``rounded_lse``: the output rounded where the rules round; ``rounded_lse`` is
  float64.

``q_nope``, ``q_pe``, ``ckv``, ``k_pe`` and ``rounded_out`` are stored as bit patterns: unsigned
integers with the width of the problem's dtype. Before the first step, every byte of a cache is
poison. The steps of a rank, with any mask, use the same cache one after the other.
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
    """Check that the outputs of a trace are known.

    Raises
    ------
    InvalidArgument
        In the cache format, tokens share scales, so the cached values of a request depend on more
        than its own tokens.
    """
    for problem in trace.problems.values():
        if problem.layout.format.couples_tokens:
            allowed = "formats in which the bytes of a token do not depend on other tokens"
            raise InvalidArgument("cache_format", problem.cache_format, allowed)


def save_trace(trace: Trace, steps: Iterable[TraceStep], path: Path) -> None:
    """Write a trace step by step; hold only one step in memory.

    Raises
    ------
    InvalidArgument
        The outputs are not known, or a step is larger than a reader accepts.
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
                raise InvalidArgument(str(path), given, f"at most {LARGEST_ARRAYS} bytes")
            archive.writestr(f"{folder:09}/step.json", json.dumps(about))
            for name, array in arrays.items():
                with archive.open(f"{folder:09}/{name}.npy", "w") as file:
                    contiguous = np.ascontiguousarray(array)
                    np.lib.format.write_array(file, contiguous, (1, 0), allow_pickle=False)


def load_trace(path: Path) -> tuple[Trace, Iterator[TraceStep]]:
    """Return a trace and an iterator over its steps, which reads and checks one step at a time.

    Raises
    ------
    InvalidArgument
        The file is not a trace of this version. The iterator raises the errors of a step.
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
            raise InvalidArgument(
                "problems", "no causal problem", "a causal problem, and optionally a tree problem"
            )
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
    """The contents of ``step.json``."""

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
                raise InvalidArgument(where, "not the next step", f"the folder {number:09}")
            about = build(_About, archive.read_object(f"{folder}/step.json"), f"{where}/step.json")
            known = {f"{folder}/{name}.npy": name for name in (*_ARRAYS, *_EXPECTED)}
            if unknown := set(members) - known.keys() - {f"{folder}/step.json"}:
                raise InvalidArgument(
                    f"{path}: {min(unknown)!r}", "an unknown member", ", ".join(known)
                )
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
        raise InvalidArgument(
            "step.json", given, f"the mask of a problem, and a rank below {header.world}"
        )
    if missing := {*_ARRAYS, *_EXPECTED} - arrays.keys() - {"mask", "slot_mapping"}:
        raise InvalidArgument(f"{min(missing)}.npy", "nothing", "a member with this name")
    dtype = numpy_dtype(header.dtype)
    for name in (*_AS_BITS, "rounded_out"):
        unsigned = bits(np.zeros(0, dtype)).dtype
        if arrays[name].dtype != unsigned:
            raise InvalidArgument(
                name, arrays[name].dtype, f"{unsigned} with the bits of {header.dtype}"
            )
        arrays[name] = arrays[name].view(dtype)
    batch = Batch(**{name: arrays[name] for name in _ARRAYS if name in arrays})
    validate_batch(header.problems[about.mask], batch)
    _check_expected(batch, arrays)
    if len(about.tokens) > batch.num_tokens:
        given = f"{len(about.tokens)} tokens"
        raise InvalidArgument("step.json: tokens", given, f"at most {batch.num_tokens} tokens")
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
