"""The guards of the surroundings: how each says what it found, and what it is like without it."""

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
    """One of the surroundings.

    Parameters
    ----------
    name : str
    finds : str
        What of a kernel shows by it.
    says : str
        A regular expression that the error of such a kernel matches from its beginning.
    removed : callable
        Returns a context without this guard.
    lacks : callable
        Returns what is missing here to run such a kernel, as "a GPU"; "" if nothing is.
    """

    name: str
    finds: str
    says: str
    removed: Callable[[], AbstractContextManager[None]]
    lacks: Callable[[], str] = str


def _in_time(*_: object) -> AbstractContextManager[Callable[[], bool]]:
    """Give a call inputs that are there, on the current stream."""
    return nullcontext(lambda: False)


def _unwatched(*_: object) -> None:
    """Look at no byte."""


def _gpu() -> str:
    return "" if torch.cuda.is_available() else "a GPU"


def _gpu_with_triton() -> str:
    fills = torch.cuda.is_available() and can_fill(torch.device("cuda"))
    return "" if fills else "a GPU since Ampere, and Triton"


_NAN = r"\[S-9\] .*nan"

ZONES = Guard(
    "guard zones",
    "writes beside a tensor",
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
    "reads beside a tensor",
    _NAN,
    partial(patched, (margins, "FILLING", 0)),
)
UNINITIALIZED = Guard(
    "NaN from `torch.empty`",
    "reads of memory that nobody wrote",
    _NAN,
    partial(
        patched,
        (calls, "uninitialized_is_nan", nullcontext),
        (torch, "empty_like", torch.zeros_like),  # as fresh memory mostly is
    ),
)
SHARED_MEMORY = Guard(
    "NaN in shared memory",
    "reads of shared memory that it did not write",
    _NAN,
    partial(patched, (calls, "fill_shared_memory", partial(fill_shared_memory, word=0))),
    _gpu_with_triton,
)
STREAM = Guard(
    "a stream of its own",
    "launches on another stream than the current one",
    r"\[S-\d+\] ",
    partial(patched, (calls, "late_inputs", _in_time)),
    _gpu,
)
GUARDS = (ZONES, INPUTS, NAN_BESIDE, UNINITIALIZED, SHARED_MEMORY, STREAM)
