"""Check and convert single arguments; ``InvalidArgument`` names the argument that is wrong."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch

from paged_mla_shared.errors import InvalidArgument, Unsupported


def integer(name: str, value: Any) -> int:
    """Return an argument as a Python integer, which kernel launches require.

    NumPy integers are accepted. A bool is rejected, since Python would use it as 0 or 1. A tensor
    on a device is rejected too, since reading its value would wait for the device.
    """
    if isinstance(value, bool):
        raise InvalidArgument(name, value, "an integer")
    if isinstance(value, torch.Tensor) and (value.dtype is torch.bool or not value.is_cpu):
        given = f"a tensor of {value.dtype} on {value.device}"
        raise InvalidArgument(name, given, "an integer on the host")
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(name, repr(value), "an integer") from None


def take_integers(config: object, *names: str) -> None:
    """Convert fields of a frozen dataclass to Python integers with :func:`integer`."""
    for name in names:
        object.__setattr__(config, name, integer(name, getattr(config, name)))


def check_at_least(least: int, **sizes: Any) -> None:
    """Check that each of `sizes` is an integer that is at least `least`."""
    for name, size in sizes.items():
        if integer(name, size) < least:
            raise InvalidArgument(name, size, f">= {least}")


def check_int32(name: str, value: Any) -> None:
    """Check an integer that an int32 table will store."""
    if not -(2**31) <= integer(name, value) < 2**31:
        raise InvalidArgument(name, value, "an int32")


def check_between(least: int, most: int, **sizes: Any) -> None:
    """Check that each of `sizes` is an integer from `least` to `most`, both included."""
    for name, size in sizes.items():
        if not least <= integer(name, size) <= most:
            raise InvalidArgument(name, size, f"{least} to {most}")


def check_rank(world: int, rank: int) -> None:
    """Check that `world` is at least 1 and that `rank` is from 0 to ``world - 1``."""
    check_at_least(1, world=world)
    if not 0 <= integer("rank", rank) < world:
        raise InvalidArgument("rank", rank, f"0 to {world - 1}")


def take_scale(config: object, name: str) -> None:
    """Convert a field of a frozen dataclass to a Python float that :func:`check_scale` accepts.

    Triton does not accept NumPy floats, and compiles another kernel for an integer.
    """
    value = getattr(config, name)
    check_scale(name, value)
    object.__setattr__(config, name, float(value))


def is_number(value: Any) -> bool:
    """Return whether an argument is a real number; a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_scale(name: str, value: Any) -> None:
    """Check a number by which kernels multiply or divide: finite and > 0 in float32 (S-5, S-11)."""
    if is_number(value):
        try:
            with np.errstate(over="ignore"):
                in_kernels = float(np.float32(float(value)))
        except OverflowError:  # an integer or a fraction that is too large for float64
            in_kernels = math.inf
        if math.isfinite(in_kernels) and in_kernels > 0:
            return
    raise InvalidArgument(name, repr(value), "a finite float32 > 0")


def take_flag(config: object, name: str) -> None:
    """Convert a field of a frozen dataclass to a Python bool; Triton accepts no NumPy bool."""
    value = getattr(config, name)
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(name, repr(value), "True or False")
    object.__setattr__(config, name, bool(value))


def check_word(name: str, value: Any, words: Collection[str]) -> None:
    """Check that an argument is one of the allowed words."""
    if not isinstance(value, str) or value not in words:
        raise InvalidArgument(name, repr(value), ", ".join(map(repr, words)))


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Check that an argument has one of the types `kinds`."""
    if not isinstance(value, kinds):
        given = None if value is None else f"a {type(value).__name__}"
        raise InvalidArgument(name, given, " or ".join(f"a {kind.__name__}" for kind in kinds))


def each_of(name: str, given: Any, *kinds: type) -> tuple[Any, ...]:
    """Return the elements of a sequence as a tuple, after a check that each has one of the types.

    The argument itself must not have one of the types `kinds`.
    """
    if isinstance(given, kinds) or not isinstance(given, Iterable):
        of_kinds = " or ".join(kind.__name__ for kind in kinds)
        kind = None if given is None else f"a {type(given).__name__}"
        raise InvalidArgument(name, kind, f"a sequence of {of_kinds}")
    elements = tuple(given)
    for element in elements:
        check_kind(name, element, *kinds)
    return elements


def device_of(device: str | torch.device) -> torch.device:
    """Return an argument as a ``torch.device``, with an index if it is a GPU.

    Raises
    ------
    InvalidArgument
        The argument is neither a ``torch.device`` nor a device name.
    Unsupported
        No device has this name, or this build of torch does not support it.
    """
    try:
        return torch.empty(0, device=device).device
    except TypeError:
        raise InvalidArgument("device", repr(device), "a torch.device or its name") from None
    except (AssertionError, RuntimeError) as error:
        raise Unsupported(
            f"device {device} is not available: {str(error).splitlines()[0]}"
        ) from None
