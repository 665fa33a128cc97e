"""Kernels that each access memory or streams in one way that is not allowed.

Without surroundings of their calls, their outputs are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paged_mla_adapters.kernel import AppendCall, Call, KernelBackend, MergeCall
from paged_mla_adapters.mutants import right
from paged_mla_adapters.mutants.guard import (
    INPUTS,
    NAN_BESIDE,
    SHARED_MEMORY,
    STREAM,
    UNINITIALIZED,
    ZONES,
    Guard,
)
from paged_mla_adapters.runner import Answers


@dataclass(frozen=True)
class Careless:
    """A careless kernel.

    Parameters
    ----------
    name : str
    operation : {"attend", "append", "merge"}
        The operation that the kernel computes.
    guard : Guard
        The guard that should find the fault.
    what : str
        A sentence that describes the fault.
    kernel : callable
    """

    name: str
    operation: str
    guard: Guard
    what: str
    kernel: Callable[[Any], Any]

    @property
    def backend(self) -> KernelBackend:
        """A backend with this kernel and correct kernels for the other operations."""
        hook = "kernel" if self.operation == "attend" else self.operation
        return right.backend(self.name, **{hook: self.kernel})


MUTANTS: dict[str, Careless] = {}
"""Every careless kernel, by its name."""


def _careless(guard: Guard, operation: str = "attend") -> Callable[[Callable[[Any], Any]], None]:
    """Return a decorator that adds a function to the list, with its name and docstring."""

    def add(kernel: Callable[[Any], Any]) -> None:
        name = kernel.__name__.replace("_", "-")
        what = " ".join((kernel.__doc__ or "").split())
        MUTANTS[name] = Careless(name, operation, guard, what, kernel)

    return add


def _around(tensor: torch.Tensor, before: int = 0, behind: int = 0) -> torch.Tensor:
    """Return the bytes before a dense tensor, or else the bytes after it, as uint8.

    Parameters
    ----------
    tensor : Tensor
    before : int
        The number of bytes before the tensor to return; 0 returns the bytes after it.
    behind : int
        The number of bytes after the tensor to return, if `before` is 0.
    """
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    everything = everything.set_(tensor.untyped_storage())
    first = tensor.storage_offset() * tensor.element_size()
    if before:
        return everything[first - before : first]
    end = first + tensor.nbytes
    return everything[end : end + behind]


def _plus_nothing(answers: Answers, read: torch.Tensor) -> Answers:
    """Add 0 times the sum of `read` to the output, which changes it only if `read` has a NaN."""
    return answers[0] + 0 * read.sum(), answers[1]


@_careless(ZONES)
def writes_before_the_cache(call: Call) -> Answers:
    """Write 64 bytes before the cache."""
    _around(call.cache, before=64).zero_()
    return right.attend(call)


@_careless(ZONES)
def writes_behind_the_cache(call: Call) -> Answers:
    """Write one byte 100 bytes after the end of the cache."""
    _around(call.cache, behind=101)[-1] = 0
    return right.attend(call)


@_careless(ZONES)
def writes_behind_a_part_of_the_cache(call: Call) -> Answers:
    """Take the cache as two tensors and write a word after the first."""
    _around(call.cache_parts[0], behind=4).fill_(1)
    return right.attend(call)


@_careless(ZONES)
def writes_behind_its_output(call: Call) -> Answers:
    """Write a word after the output."""
    out, lse = right.attend(call)
    _around(out, behind=4).fill_(1)
    return out, lse


@_careless(ZONES)
def writes_before_its_lse(call: Call) -> Answers:
    """Write a word before the lse."""
    out, lse = right.attend(call)
    _around(lse, before=4).fill_(1)
    return out, lse


@_careless(ZONES, "append")
def writes_the_slot_before_the_first(call: AppendCall) -> None:
    """Write a token without a slot, whose slot is -1, before the cache."""
    right.append(call)
    if (call.slot_mapping < 0).any():
        token = torch.cat([call.ckv, call.k_pe], -1)[call.slot_mapping < 0][-1]
        _around(call.cache, before=token.nbytes).copy_(token.view(torch.uint8))


@_careless(ZONES, "merge")
def merges_one_token_too_many(call: MergeCall) -> Answers:
    """Write the lse of one token more than there are."""
    out, merged = right.merge(call)
    lse = call.buffer("the lse", tuple(merged.shape)).copy_(merged)
    _around(lse, behind=4 * lse.shape[1]).zero_()
    return out, lse


@_careless(INPUTS)
def writes_its_queries(call: Call) -> Answers:
    """Scale the queries in place."""
    answers = right.attend(call)
    call.q.mul_(3.0).add_(1.0)
    return answers


@_careless(INPUTS)
def writes_a_part_of_its_queries(call: Call) -> Answers:
    """Take the queries as two tensors and change the second in place."""
    answers = right.attend(call)
    call.query_parts[1].neg_()
    return answers


@_careless(INPUTS)
def writes_its_lengths(call: Call) -> Answers:
    """Add 1 to the lengths, for the next step."""
    answers = right.attend(call)
    call.seq_lens.add_(1)
    return answers


@_careless(INPUTS, "append")
def writes_its_slots(call: AppendCall) -> None:
    """Overwrite the slots of written tokens with -1."""
    right.append(call)
    call.slot_mapping.fill_(-1)


@_careless(INPUTS, "merge")
def merges_in_place(call: MergeCall) -> Answers:
    """Write the merged result over the first partial result."""
    out, lse = right.merge(call)
    return call.out_a.copy_(out), call.lse_a.copy_(lse)


@_careless(NAN_BESIDE)
def reads_before_the_cache(call: Call) -> Answers:
    """Read memory before the first key and add it with weight 0."""
    return _plus_nothing(right.attend(call), _around(call.cache, before=64).view(call.cache.dtype))


@_careless(NAN_BESIDE)
def reads_behind_its_queries(call: Call) -> Answers:
    """Read memory after the last query and add it with weight 0."""
    return _plus_nothing(right.attend(call), _around(call.q, behind=64).view(call.q.dtype))


@_careless(NAN_BESIDE)
def reads_behind_a_part_of_the_cache(call: Call) -> Answers:
    """Take the cache as two tensors, read memory after the second and add it with weight 0."""
    part = call.cache_parts[1]
    return _plus_nothing(right.attend(call), _around(part, behind=64).view(part.dtype))


@_careless(UNINITIALIZED)
def adds_to_what_is_uninitialized(call: Call) -> Answers:
    """Add the output to memory that was not initialized with 0."""
    out, lse = right.attend(call)
    total = torch.empty_like(out)
    total += out - total
    return total, lse


@_careless(SHARED_MEMORY)
def reads_shared_memory_that_it_did_not_write(call: Call) -> Answers:
    """Read shared memory that the kernel did not write and add it with weight 0."""
    from paged_mla_adapters.surroundings.kernels import (  # noqa: PLC0415 - it needs Triton
        shared_memory,
    )

    read = torch.zeros(1, device=call.q.device)
    shared_memory.read_shared_memory[(1,)](read, 0, PIECES=64, num_warps=4)
    return _plus_nothing(right.attend(call), read)


@_careless(STREAM)
def launches_on_the_default_stream(call: Call) -> Answers:
    """Launch the kernel on the default stream instead of the current stream."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return right.attend(call)
