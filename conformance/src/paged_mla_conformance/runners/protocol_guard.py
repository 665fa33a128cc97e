"""Check every call of a backend: inputs keep their bits, and results are new, legal arrays.

The guard wraps the backend directly, inside the translation of a profile. It therefore checks the
arrays that the backend received and returned, and not arrays of the translation.
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
    """A backend broke the protocol in a way that breaks no rule of the specification."""


class GuardedBackend:
    """A backend whose calls are checked; see :class:`paged_mla_shared.backend.Backend`.

    Attributes that the backend declares are read once, except ``memory_bytes``.

    Parameters
    ----------
    inner : Backend
    warned : Counter of str
        The warnings of every call are added to it.
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
        """The memory that is free on the backend at the time of the call."""
        with _watched("memory_bytes", {}, self._warned):
            return self._inner.memory_bytes

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner whose calls are checked."""
        with _watched("prepare", {}, self._warned):
            inner = self._inner.prepare(problem)
        return GuardedRunner(inner, self._warned)

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Return a runner that does not validate values, and whose calls are checked."""
        with _watched("prepare_unchecked", {}, self._warned):
            inner = cast("BoundedBackend", self._inner).prepare_unchecked(problem)
        return GuardedRunner(inner, self._warned)


class GuardedRunner(Runner):
    """A runner whose calls are checked; see :class:`paged_mla_shared.backend.Runner`.

    The table ``OPERATIONS`` defines the arguments and the result of each operation.
    """

    def __init__(self, inner: Runner, warned: Counter[str]) -> None:
        self._inner = inner
        self._warned = warned
        self._answers: list[tuple[str, weakref.ref[NDArray[Any]]]] = []  # earlier results
        self._image = _Given({})

    def load_cache(self, image: CacheImage) -> None:
        """Load an image."""
        arrays = {name: getattr(image, name) for name in ("block_ids", "blocks", "poison")}
        with self._watched("load_cache", arrays):
            self._inner.load_cache(image)
        self._image = _Given(arrays)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read blocks as a contiguous uint8 array."""
        arrays = {"block_ids": block_ids}
        with self._watched("read_cache", arrays):
            blocks = self._inner.read_cache(block_ids)
        self._check("read_cache", arrays, {"blocks": (blocks, 2)})
        if blocks.dtype != np.uint8:
            raise ProtocolBroken(f"read_cache returned {blocks.dtype}; the protocol requires uint8")
        return np.ascontiguousarray(blocks)  # rows and fields are views of them

    def call(self, operation: Operation, first: Any, *others: Any) -> Any:
        """Call an operation, and check its inputs and its result.

        Raises
        ------
        Mismatch
            An input changed (S-10), or a result shares memory with an input or with an earlier
            result that is still in use (S-17).
        ProtocolBroken
            The result has a wrong type or number of axes, or the backend tried to end a test.
        """
        arrays = _arrays(first)
        with self._watched(operation.name, arrays):
            found = getattr(self._inner, operation.name)(first, *others)
        if operation.returns is None:
            return found  # the protocol defines no result; callers ignore it
        self._check(operation.name, arrays, _results(operation, found))
        return found

    @contextmanager
    def _watched(self, call: str, inputs: Arrays) -> Iterator[None]:
        """Check one call, and that the loaded image keeps its bits: a cache must not be a view."""
        with _watched(call, inputs, self._warned):
            yield
        self._image.hold_unwritten(f"{call} wrote to the loaded image's")

    def _check(self, call: str, inputs: Arrays, results: dict[str, tuple[Any, int]]) -> None:
        """Check that each result is a NumPy array with the right axes and its own memory."""
        for name, (array, axes) in results.items():
            # A subclass may compare in another way: a masked element would never be wrong.
            if type(array) is not np.ndarray:
                kind = _kind(array)
                raise ProtocolBroken(
                    f"{call} returned {name} as a {kind}; the protocol requires a NumPy array"
                )
            if array.ndim != axes:
                raise ProtocolBroken(
                    f"{call} returned {name} with {array.ndim} axes; the protocol requires {axes}"
                )
            for other, given in inputs.items():
                if np.may_share_memory(array, given):
                    raise Mismatch("S-17", call, f"{name} shares memory with its input {other}")
            for other, reference in self._answers:
                earlier = reference()
                if earlier is not None and np.may_share_memory(array, earlier):
                    raise Mismatch("S-17", call, f"{name} shares memory with an earlier {other}")
        self._answers = [known for known in self._answers if known[1]() is not None]
        self._answers += [
            (f"{name} of {call}", weakref.ref(array)) for name, (array, _) in results.items()
        ]


@contextmanager
def counted_warnings(warned: Counter[str]) -> Iterator[None]:
    """Count the warnings of a block in `warned`; without this, the suite raises them as errors."""

    def count(  # noqa: PLR0917 - the signature of warnings.showwarning
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG001 - part of the signature
        line: str | None = None,  # noqa: ARG001 - part of the signature
    ) -> None:
        warned[warning_text(message, category, filename, lineno)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        yield


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int
) -> str:
    """Return the text of a warning for reports."""
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"


@contextmanager
def _watched(call: str, inputs: Arrays, warned: Counter[str]) -> Iterator[None]:
    """Check the inputs of one call, count its warnings, and add the call to its exceptions."""
    given = _Given(inputs)
    try:
        with counted_warnings(warned):
            yield
    except BaseException as error:
        # A backend must not end or skip a test.
        ordinary = isinstance(error, Exception)
        if not ordinary or isinstance(error, pytest.exit.Exception | unittest.SkipTest):
            raise ProtocolBroken(
                f"backend raised {type(error).__name__} ({error}) in {call}"
            ) from error
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            raise OutOfMemory(str(error)) from error  # torch and CuPy need not be installed
        error.add_note(f"backend raised {type(error).__name__} in {call}{_hint(error)}")
        raise
    finally:
        given.hold_unwritten(f"{call} wrote to its input")


def _hint(error: BaseException) -> str:
    """Return the most frequent reason of an exception, after a colon; "" if none is known."""
    if not isinstance(error, IndexError):
        return ""
    return (
        ": it may have used an entry that it must not read (S-9), for example a table entry after "
        "the blocks of a row; such entries hold 2^31 - 1 or other invalid ids"
    )


class _Given:
    """Copies of the arrays that were passed to a call."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._before = {name: array.copy() for name, array in arrays.items()}

    def hold_unwritten(self, what: str) -> None:
        """Check that no bit of the arrays changed.

        Parameters
        ----------
        what : str
            The beginning of the error message, before the name of the array.

        Raises
        ------
        Mismatch
            An array changed (S-10).
        """
        for name, array in self._arrays.items():
            now, then = _bits(array), _bits(self._before[name])
            if not np.array_equal(now, then):
                at = tuple(int(i) for i in np.argwhere(now != then)[0])
                raise Mismatch("S-10", f"{what} {name}", f"first at {at}")


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view of the elements as integers, in which NaN equals itself and 0 is not -0."""
    return array.view(f"u{array.itemsize}")


def _arrays(first: Any) -> Arrays:
    """Return the arrays of the first argument of an operation by their names.

    The argument is a batch, a layer with a step in it, or a sequence of partial results.
    """
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
    """Return the arrays of a result with the axes that the protocol requires, by name."""
    name, wanted, arrays = operation.name, operation.returns, operation.arrays
    assert wanted is not None
    if wanted is np.ndarray:
        [(only, axes)] = arrays.items()
        return {only: (found, axes)}
    if not isinstance(found, wanted):
        raise ProtocolBroken(
            f"{name} returned a {_kind(found)}; the protocol requires {wanted.__name__}"
        )
    if not isinstance(found, tuple):
        return {array: (getattr(found, array), axes) for array, axes in arrays.items()}
    if len(found) != len(arrays):
        raise ProtocolBroken(
            f"{name} returned {len(found)} values; the protocol requires {len(arrays)}"
        )
    return {array: (one, axes) for one, (array, axes) in zip(found, arrays.items(), strict=True)}


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _called(operation: Operation) -> Callable[..., Any]:
    return lambda runner, *given: runner.call(operation, *given)


for _operation in OPERATIONS.values():
    setattr(GuardedRunner, _operation.name, _called(_operation))
