"""A stream of their own for calls, on which inputs are written late.

A kernel that is launched on another stream, the default one above all, runs before its inputs are
there, and reads the poison in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from paged_mla_adapters.surroundings import switch

_SLEEP = 20_000_000  # cycles, about 10 ms: longer than a compiled kernel takes to be launched


@contextmanager
def late_inputs(
    placed: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], device: torch.device
) -> Iterator[Callable[[], bool]]:
    """Run what is inside on a stream of its own, and wait for the device behind it.

    Parameters
    ----------
    placed : mapping of str to Tensor
        What the call gets: poison, until the stream has slept.
    given : mapping of str to Tensor
        What is copied there then, by the same names.
    device : torch.device
        On a CPU, which has no streams, nothing is done.

    Yields
    ------
    callable
        Returns whether the inputs have come. Where they have come before the call returned, its
        kernels may have been launched after them, and the call proves nothing about its stream.

    Notes
    -----
    Floats are poisoned by NaN. Integers are 0, which makes an answer wrong and no address illegal.
    """
    if device.type != "cuda":
        yield lambda: False
        return
    poison = 0.0 if switch.value() == switch.LATE_INPUTS else torch.nan
    for tensor in placed.values():
        tensor.fill_(poison if tensor.is_floating_point() else 0)
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(_stream_of(device)):
            torch.cuda._sleep(_SLEEP)  # type: ignore[no-untyped-call]  # torch has no types
            for name, tensor in placed.items():
                tensor.copy_(given[name])
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types
            written.record()
            yield written.query
    finally:
        torch.cuda.synchronize(device)  # a fault is raised here, in the call that caused it


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all calls: torch's allocator keeps memory for each that it sees."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types
