"""The guards of the surroundings: their messages, and how to turn each guard off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from paged_mla_adapters.guards import Guards
from paged_mla_adapters.surroundings import calls, margins
from paged_mla_adapters.surroundings.shared_memory import can_fill, fill_shared_memory
from paged_mla_reference.faults.patches import patched


@dataclass(frozen=True)
class Guard:
    """A part of the surroundings that finds one kind of fault.

    Parameters
    ----------
    name : str
    finds : str
        The kind of fault that the guard finds.
    says : str
        A regular expression that matches the error of a kernel with this fault, from its start.
    removed : callable
        Returns a context in which this guard is off.
    lacks : callable
        Returns the requirement that this machine does not meet, for example "a GPU", or "".
    """

    name: str
    finds: str
    says: str
    removed: Callable[[], AbstractContextManager[None]]
    lacks: Callable[[], str] = str


def _in_time(*_: object) -> AbstractContextManager[Callable[[], bool]]:
    """Replace :func:`late_inputs`: the inputs are complete, and the current stream is used."""
    return nullcontext(lambda: False)


def _unwatched(*_: object) -> None:
    """Replace :meth:`Guards.check` by a check of no bytes."""


def _gpu() -> str:
    return "" if torch.cuda.is_available() else "a GPU"


def _gpu_with_triton() -> str:
    fills = torch.cuda.is_available() and can_fill(torch.device("cuda"))
    return "" if fills else "a GPU since Ampere, and Triton"


_NAN = r"\[S-9\] .*nan"

ZONES = Guard(
    "guard zones",
    "writes outside a tensor",
    r"\[S-10\] \w+: \d+ bytes? written (before|behind) ",
    partial(patched, (Guards, "check", _unwatched)),
)
INPUTS = Guard(
    "watched inputs",
    "writes to an input",
    r"\[S-10\] \w+: the input \w+ was changed in ",
    ZONES.removed,
)
NAN_BESIDE = Guard(
    "NaN in guard zones",
    "reads outside a tensor",
    _NAN,
    partial(patched, (margins, "FILLING", 0)),
)
UNINITIALIZED = Guard(
    "NaN from `torch.empty`",
    "reads of memory that was not written",
    _NAN,
    partial(
        patched,
        (calls, "uninitialized_is_nan", nullcontext),
        (torch, "empty_like", torch.zeros_like),  # new memory is mostly 0
    ),
)
SHARED_MEMORY = Guard(
    "NaN in shared memory",
    "reads of shared memory that the kernel did not write",
    _NAN,
    partial(patched, (calls, "fill_shared_memory", partial(fill_shared_memory, word=0))),
    _gpu_with_triton,
)
STREAM = Guard(
    "a separate stream",
    "launches on a stream other than the current stream",
    r"\[S-\d+\] ",
    partial(patched, (calls, "late_inputs", _in_time)),
    _gpu,
)
GUARDS = (ZONES, INPUTS, NAN_BESIDE, UNINITIALIZED, SHARED_MEMORY, STREAM)
