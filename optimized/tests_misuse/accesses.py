"""Check every address that an interpreted kernel accesses against the tensors of its launch.

Triton's interpreter follows any pointer: a load outside the tensors of a launch reads other memory
or ends the process. Here it ends the launch, with a message that names the kernel and the
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

_MASKED = ("create_masked_load", "create_masked_store", "create_atomic_rmw")


class OutOfBounds(AssertionError):
    """A kernel reads or writes outside the tensors of its launch."""


class _Launch:
    """The bytes that one launch may access, by storage."""

    def __init__(self, kernel: str, tensors: dict[str, torch.Tensor]) -> None:
        self._kernel, self._tensors = kernel, {n: t for n, t in tensors.items() if t.numel()}
        maps: dict[int, torch.Tensor] = {}
        for tensor in self._tensors.values():
            storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
            base = storage.data_ptr()
            touched = maps.setdefault(base, torch.zeros(storage.nbytes(), dtype=torch.bool))
            axes = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
            shape, strides = (*(n for n, _ in axes), size), (*(s * size for _, s in axes), 1)
            touched.as_strided(shape, strides, tensor.data_ptr() - base).fill_(value=True)
        self._bases = np.array([0, *sorted(maps)], np.uint64)
        self._maps = [np.zeros(1, bool), *(maps[base].numpy() for base in sorted(maps))]

    def check(self, verb: str, addresses: np.ndarray, mask: Any, width: int) -> None:
        """Check the addresses of accesses of `width` bytes that a mask allows."""
        chosen = np.broadcast_to(mask, addresses.shape).astype(bool)
        taken = np.unique(addresses[chosen].astype(np.uint64))
        storage = np.searchsorted(self._bases, taken, side="right") - 1
        for number in np.unique(storage):
            inside, mine = self._maps[number], taken[storage == number]
            offset = mine - self._bases[number]
            known = offset <= len(inside) - width if len(inside) >= width else offset < 0
            at = np.where(known, offset, 0).astype(np.int64)
            legal = known & inside[at] & inside[np.minimum(at + width - 1, len(inside) - 1)]
            if not legal.all():
                raise OutOfBounds(self._message(verb, int(mine[~legal][0]), width))

    def _message(self, verb: str, address: int, width: int) -> str:
        nearest, distance = "no tensor", math.inf
        for name, tensor in self._tensors.items():
            first = tensor.data_ptr()
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = first + (reach + 1) * tensor.dtype.itemsize
            away = max(first - address, address + width - end, 0)
            if away < distance:
                place = (
                    f"{first - address} bytes before the start"
                    if address < first
                    else (f"{address - end} bytes after the end" if address >= end else "in a gap")
                )
                nearest, distance = f"{place} of {name}", away
        return f"{self._kernel} {verb} {width} bytes outside its tensors, {nearest}"


@contextmanager
def checked_accesses() -> Iterator[list[str]]:
    """Raise ``OutOfBounds`` at the first address outside a launch's tensors.

    Returns
    -------
    list of str
        The names of the launched kernels, added at each launch.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    launched: list[str] = []
    current: list[_Launch] = []
    launch, compare = executor.__call__, builder.create_atomic_cas
    kept = {name: getattr(builder, name) for name in _MASKED}

    def checked_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launched.append(self.fn.__name__)
        current[:] = [_Launch(self.fn.__name__, dict(_tensors(given)))]
        try:
            launch(self, *args, **kwargs)
        except InterpreterError as error:
            raise _cause(error) from None

    def look(verb: str, pointers: Any, mask: Any) -> None:
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        current[-1].check(verb, pointers.data, mask, width)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        look("reads", pointers, mask.data)
        return kept["create_masked_load"](self, pointers, mask, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look("writes", pointers, mask.data)
        return kept["create_masked_store"](self, pointers, value, mask, *rest)

    def update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look("updates", pointers, mask.data)
        return kept["create_atomic_rmw"](self, op, pointers, value, mask, *rest)

    def exchange(self: Any, pointers: Any, *rest: Any) -> Any:
        look("updates", pointers, True)  # noqa: FBT003 - NumPy's mask of all
        return compare(self, pointers, *rest)

    executor.__call__ = checked_launch
    builder.create_masked_load, builder.create_masked_store = load, store
    builder.create_atomic_rmw, builder.create_atomic_cas = update, exchange
    try:
        yield launched
    finally:
        executor.__call__, builder.create_atomic_cas = launch, compare
        for name, method in kept.items():
            setattr(builder, name, method)


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a launch by parameter, and those of records by field."""
    for name, argument in given.items():
        if isinstance(argument, torch.Tensor):
            yield name, argument
        elif hasattr(argument, "_asdict"):
            fields = argument._asdict().items()
            yield from _tensors({f"{name}.{field}": value for field, value in fields})


def _cause(error: BaseException) -> BaseException:
    """Return the error that ended an interpreted program, without the interpreter's wrappers."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error
