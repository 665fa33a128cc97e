"""Checks every call of a backend: inputs keep their bits, results are new arrays of legal form.

It lies directly around the backend, inside what a profile translates: what is checked is then what
the backend really got and gave, never an array that the translation made.
"""

from __future__ import annotations

import unittest
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.backend import OPERATIONS, Backend, BoundedBackend, Runner
from paged_mla_shared.errors import OutOfMemory
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.operation import Operation
from paged_mla_shared.problem import Batch, Problem

Arrays = dict[str, NDArray[Any]]


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
        self.has_surroundings = bool(getattr(inner, "has_surroundings", False))

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


class GuardedRunner(Runner):
    """See :class:`paged_mla_shared.backend.Runner`. Operations are called by what they declare."""

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

    def call(self, operation: Operation, first: Any, *others: Any) -> Any:
        """Ask for an operation, and hold its inputs and its result against the protocol."""
        arrays = _arrays(first)
        with self._watched(operation.name, arrays):
            found = getattr(self._inner, operation.name)(first, *others)
        if operation.returns is None:
            return found  # callers ignore what a method without a result returns
        self._check(operation.name, arrays, _results(operation, found))
        return found

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
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            raise OutOfMemory(str(error)) from error  # torch's and CuPy's: the suite has neither
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


def _arrays(first: Any) -> Arrays:
    """Return the arrays of what an operation takes: a batch, one with a step in it, or partials."""
    if isinstance(first, Sequence):
        return {
            f"partials[{i}].{name}": array
            for i, partial in enumerate(first)
            for name, array in vars(partial).items()
        }
    found: Arrays = {}
    for name, value in vars(first).items():
        if isinstance(value, np.ndarray):
            found[name] = value
        elif isinstance(value, Batch):
            found |= _arrays(value)
    return found


def _results(operation: Operation, found: Any) -> dict[str, tuple[Any, int]]:
    """Return the arrays of a result with the axes that the protocol gives them, by name."""
    name, wanted, arrays = operation.name, operation.returns, operation.arrays
    assert wanted is not None
    if wanted is np.ndarray:
        [(only, axes)] = arrays.items()
        return {only: (found, axes)}
    if not isinstance(found, wanted):
        raise ProtocolBroken(
            f"{name} returned a {_kind(found)}; the protocol has a {wanted.__name__}"
        )
    if not isinstance(found, tuple):
        return {array: (getattr(found, array), axes) for array, axes in arrays.items()}
    if len(found) != len(arrays):
        raise ProtocolBroken(f"{name} returned {len(found)} values; the protocol has {len(arrays)}")
    return {array: (one, axes) for one, (array, axes) in zip(found, arrays.items(), strict=True)}


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _called(operation: Operation) -> Callable[..., Any]:
    return lambda runner, *given: runner.call(operation, *given)


for _operation in OPERATIONS.values():
    setattr(GuardedRunner, _operation.name, _called(_operation))
