"""A separate stream for calls, on which the inputs are written late.

A kernel on another stream, for example the default stream, runs before its inputs are written and
reads poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from paged_mla_adapters.surroundings import switch

_SLEEP = 20_000_000  # cycles, about 10 ms: longer than the launch of a compiled kernel


@contextmanager
def late_inputs(
    placed: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], device: torch.device
) -> Iterator[Callable[[], bool]]:
    """Run the body of the context on a separate stream, then wait for the device.

    Parameters
    ----------
    placed : mapping of str to Tensor
        The inputs of the call, which contain poison until the stream has waited.
    given : mapping of str to Tensor
        The values of the inputs, by the same names, which the stream copies then.
    device : torch.device
        On a CPU, which has no streams, the context does nothing.

    Yields
    ------
    callable
        A function that returns whether the inputs are complete. If they are complete before the
        call returns, its kernels may have started after them, and the call shows nothing about its
        stream.

    Notes
    -----
    The poison of floats is NaN, or 0 where ``PAGED_MLA_SURROUNDINGS`` is ``zeros-in-late-inputs``.
    The poison of integers is 0, which makes an output wrong but no address illegal.
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
        torch.cuda.synchronize(device)  # raises an error of the device in the call that caused it


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all calls, because torch's allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types
