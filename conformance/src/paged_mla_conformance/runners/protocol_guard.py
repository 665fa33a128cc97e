"""Checks every call of a backend: inputs keep their bits, results are new arrays of legal form.

It lies directly around the backend, inside what a profile translates: what is checked is then what
the backend really got and gave, never an array that the translation made.
"""

from __future__ import annotations

import unittest
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.backend import Backend, BoundedBackend, Runner
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class ProtocolBroken(RuntimeError):
    """A backend did what no rule speaks of and the protocol does not have."""


class GuardedBackend:
    """See :class:`paged_mla_shared.backend.Backend`; what it declares is read once.

    Parameters
    ----------
    inner : Backend
    warned : Counter of str
        Gets the warnings of every call.
    """

    def __init__(self, inner: Backend, warned: Counter[str]) -> None:
        self._inner = inner
        self._warned = warned
        self.name, self.version = inner.name, inner.version
        self.mode, self.device = inner.mode, inner.device
        self.capabilities = inner.capabilities

    @property
    def memory_bytes(self) -> int:
        """Of the backend itself, now."""
        with _watched("memory_bytes", {}, self._warned):
            return self._inner.memory_bytes

    def prepare(self, problem: Problem) -> Runner:
        """Build a runner that is held to the protocol."""
        with _watched("prepare", {}, self._warned):
            inner = self._inner.prepare(problem)
        return GuardedRunner(inner, self._warned)

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Build a runner that looks at no values, held to the protocol too."""
        with _watched("prepare_unchecked", {}, self._warned):
            inner = cast("BoundedBackend", self._inner).prepare_unchecked(problem)
        return GuardedRunner(inner, self._warned)


class GuardedRunner:
    """See :class:`paged_mla_shared.backend.Runner`."""

    def __init__(self, inner: Runner, warned: Counter[str]) -> None:
        self._inner = inner
        self._warned = warned
        self._answers: list[tuple[str, weakref.ref[NDArray[Any]]]] = []  # those somebody holds
        self._image = _Given({})

    def load_cache(self, image: CacheImage) -> None:
        """Load."""
        arrays = {name: getattr(image, name) for name in ("block_ids", "blocks", "poison")}
        with self._watched("load_cache", arrays):
            self._inner.load_cache(image)
        self._image = _Given(arrays)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read."""
        arrays = {"block_ids": block_ids}
        with self._watched("read_cache", arrays):
            blocks = self._inner.read_cache(block_ids)
        self._check("read_cache", arrays, {"blocks": (blocks, 2)})
        if blocks.dtype != np.uint8:
            raise ProtocolBroken(f"read_cache returned {blocks.dtype}; the protocol has uint8")
        return np.ascontiguousarray(blocks)  # rows and fields are views of them

    def plan(self, batch: Batch) -> Metadata:
        """Plan."""
        arrays = _arrays(batch)
        with self._watched("plan", arrays):
            found = _of_type("plan", self._inner.plan(batch), Metadata)
        results = {"positions": (found.positions, 1), "slot_mapping": (found.slot_mapping, 1)}
        self._check("plan", arrays, results)
        return found

    def append(self, batch: Batch) -> None:
        """Append."""
        with self._watched("append", _arrays(batch)):
            self._inner.append(batch)

    def attend(self, batch: Batch) -> Output:
        """Attend."""
        arrays = _arrays(batch)
        with self._watched("attend", arrays):
            answer = _of_type("attend", self._inner.attend(batch), Output)
        self._check("attend", arrays, {"out": (answer.out, 3), "lse": (answer.lse, 2)})
        return answer

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge."""
        arrays = {
            f"partials[{i}].{name}": array
            for i, partial in enumerate(partials)
            for name, array in vars(partial).items()
        }
        with self._watched("merge", arrays):
            merged = _of_type("merge", self._inner.merge(partials), Output)
        self._check("merge", arrays, {"out": (merged.out, 3), "lse": (merged.lse, 2)})
        return merged

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather."""
        arrays = _arrays(batch)
        with self._watched("gather_context", arrays):
            found = _of_type("gather_context", self._inner.gather_context(batch), tuple)
        ckv, k_pe = _pair("gather_context", found)
        self._check("gather_context", arrays, {"ckv": (ckv, 2), "k_pe": (k_pe, 2)})
        return ckv, k_pe

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Quantise queries."""
        call, arrays = "quantise_queries", _arrays(batch)
        with self._watched(call, arrays):
            found = _of_type(call, self._inner.quantise_queries(batch, scale), tuple)
        codes, scales = _pair(call, found)
        self._check(call, arrays, {"codes": (codes, 3), "scales": (scales, 2)})
        return codes, scales

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to keys and values."""
        arrays = _arrays(batch)
        with self._watched("prefill", arrays):
            answer = _of_type("prefill", self._inner.prefill(batch), Output)
        self._check("prefill", arrays, {"out": (answer.out, 3), "lse": (answer.lse, 2)})
        return answer

    def layer(self, batch: LayerBatch) -> Output:
        """Append and attend, between a layer's projections."""
        arrays = batch.arrays
        with self._watched("layer", arrays):
            answer = _of_type("layer", self._inner.layer(batch), Output)
        self._check("layer", arrays, {"out": (answer.out, 3), "lse": (answer.lse, 2)})
        return answer

    @contextmanager
    def _watched(self, call: str, inputs: Arrays) -> Iterator[None]:
        """Watch over one call, and over the image that was loaded: a cache is no view of it."""
        with _watched(call, inputs, self._warned):
            yield
        self._image.hold_unwritten(f"{call} wrote the loaded image's")

    def _check(self, call: str, inputs: Arrays, results: dict[str, tuple[Any, int]]) -> None:
        """Hold that each result is a NumPy array of so many axes whose memory is its own."""
        for name, (array, axes) in results.items():
            # A subclass may compare otherwise: nothing masked would ever be wrong.
            if type(array) is not np.ndarray:
                kind = _kind(array)
                raise ProtocolBroken(
                    f"{call} returned {name} as a {kind}; the protocol has a NumPy array"
                )
            if array.ndim != axes:
                raise ProtocolBroken(
                    f"{call} returned {name} with {array.ndim} axes; the protocol has {axes}"
                )
            for other, given in inputs.items():
                if np.may_share_memory(array, given):
                    raise Mismatch("S-17", call, f"{name} lies in its input {other}")
            for other, reference in self._answers:
                earlier = reference()
                if earlier is not None and np.may_share_memory(array, earlier):
                    raise Mismatch("S-17", call, f"{name} lies where {other} lay before")
        self._answers = [known for known in self._answers if known[1]() is not None]
        self._answers += [
            (f"{name} of {call}", weakref.ref(array)) for name, (array, _) in results.items()
        ]


@contextmanager
def counted_warnings(warned: Counter[str]) -> Iterator[None]:
    """Count warnings where the suite would raise them."""

    def count(  # noqa: PLR0917 - the module calls it so
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG001 - part of the module's signature
        line: str | None = None,  # noqa: ARG001 - likewise
    ) -> None:
        warned[warning_text(message, category, filename, lineno)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        yield


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int
) -> str:
    """Return what reports call a warning."""
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"


@contextmanager
def _watched(call: str, inputs: Arrays, warned: Counter[str]) -> Iterator[None]:
    """Watch over one call: its inputs, its warnings, and what it raises."""
    given = _Given(inputs)
    try:
        with counted_warnings(warned):
            yield
    except BaseException as error:
        # Whatever would end or excuse a test is no answer of a backend.
        ordinary = isinstance(error, Exception)
        if not ordinary or isinstance(error, pytest.exit.Exception | unittest.SkipTest):
            raise ProtocolBroken(
                f"backend raised {type(error).__name__} ({error}) in {call}"
            ) from error
        error.add_note(f"backend raised {type(error).__name__} in {call}{_hint(error)}")
        raise
    finally:
        given.hold_unwritten(f"{call} wrote its input")


def _hint(error: BaseException) -> str:
    """Return what is most often behind an exception, behind a colon."""
    if not isinstance(error, IndexError):
        return ""
    return (
        ": it may have read an entry that no rule lets it read (S-9), as of another row or past a "
        "row's blocks; these hold 2^31 - 1 and the like"
    )


class _Given:
    """Arrays as they were handed in."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._before = {name: array.copy() for name, array in arrays.items()}

    def hold_unwritten(self, what: str) -> None:
        """Hold that every bit is still there; `what` begins the sentence, an array's name ends."""
        for name, array in self._arrays.items():
            now, then = _bits(array), _bits(self._before[name])
            if not np.array_equal(now, then):
                at = tuple(int(i) for i in np.argwhere(now != then)[0])
                raise Mismatch("S-10", f"{what} {name}", f"first at {at}")


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """View elements as integers: NaN equals itself, and 0 is not -0."""
    return array.view(f"u{array.itemsize}")


def _arrays(batch: Batch | PrefillBatch) -> Arrays:
    return {name: array for name, array in vars(batch).items() if isinstance(array, np.ndarray)}


def _of_type(call: str, value: object, wanted: type[T]) -> T:
    if not isinstance(value, wanted):
        raise ProtocolBroken(
            f"{call} returned a {_kind(value)}; the protocol has a {wanted.__name__}"
        )
    return value


def _pair(call: str, found: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(found) != 2:
        raise ProtocolBroken(f"{call} returned {len(found)} values; the protocol has 2")
    return found[0], found[1]


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
