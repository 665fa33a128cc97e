"""Kernels that do one thing which no kernel may do, to memory that its surroundings own.

Their answers are right where nothing lies around their calls.
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
        What it does.
    guard : Guard
        What is meant to find it.
    what : str
        What is wrong with it, in a sentence.
    kernel : callable
    """

    name: str
    operation: str
    guard: Guard
    what: str
    kernel: Callable[[Any], Any]

    @property
    def backend(self) -> KernelBackend:
        """The kernel as a backend, whose other operations are right."""
        hook = "kernel" if self.operation == "attend" else self.operation
        return right.backend(self.name, **{hook: self.kernel})


MUTANTS: dict[str, Careless] = {}
"""Every careless kernel, by its name."""


def _careless(guard: Guard, operation: str = "attend") -> Callable[[Callable[[Any], Any]], None]:
    """Add a function to the list, named and described as it is."""

    def add(kernel: Callable[[Any], Any]) -> None:
        name = kernel.__name__.replace("_", "-")
        what = " ".join((kernel.__doc__ or "").split())
        MUTANTS[name] = Careless(name, operation, guard, what, kernel)

    return add


def _around(tensor: torch.Tensor, before: int = 0, behind: int = 0) -> torch.Tensor:
    """Return bytes in front of a dense tensor, or behind it, uint8 [before + behind]."""
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    everything = everything.set_(tensor.untyped_storage())
    first = tensor.storage_offset() * tensor.element_size()
    if before:
        return everything[first - before : first]
    end = first + tensor.nbytes
    return everything[end : end + behind]


def _plus_nothing(answers: Answers, read: torch.Tensor) -> Answers:
    """Add what was read, times 0."""
    return answers[0] + 0 * read.sum(), answers[1]


@_careless(ZONES)
def writes_before_the_cache(call: Call) -> Answers:
    """Write 64 bytes in front of the cache."""
    _around(call.cache, before=64).zero_()
    return right.attend(call)


@_careless(ZONES)
def writes_behind_the_cache(call: Call) -> Answers:
    """Write one byte 100 bytes behind the cache."""
    _around(call.cache, behind=101)[-1] = 0
    return right.attend(call)


@_careless(ZONES)
def writes_behind_a_part_of_the_cache(call: Call) -> Answers:
    """Take the cache in two tensors and write a word behind the first."""
    _around(call.cache_parts[0], behind=4).fill_(1)
    return right.attend(call)


@_careless(ZONES)
def writes_behind_its_output(call: Call) -> Answers:
    """Write a word behind the output."""
    out, lse = right.attend(call)
    _around(out, behind=4).fill_(1)
    return out, lse


@_careless(ZONES)
def writes_before_its_lse(call: Call) -> Answers:
    """Write a word in front of the lse."""
    out, lse = right.attend(call)
    _around(lse, before=4).fill_(1)
    return out, lse


@_careless(ZONES, "append")
def writes_the_slot_before_the_first(call: AppendCall) -> None:
    """Write tokens that have no slot, for which -1 stands, in front of the cache."""
    right.append(call)
    if (call.slot_mapping < 0).any():
        token = torch.cat([call.ckv, call.k_pe], -1)[call.slot_mapping < 0][-1]
        _around(call.cache, before=token.nbytes).copy_(token.view(torch.uint8))


@_careless(ZONES, "merge")
def merges_one_token_too_many(call: MergeCall) -> Answers:
    """Write the lse of a token behind the last."""
    out, merged = right.merge(call)
    lse = call.buffer("the lse", tuple(merged.shape)).copy_(merged)
    _around(lse, behind=4 * lse.shape[1]).zero_()
    return out, lse


@_careless(INPUTS)
def writes_its_queries(call: Call) -> Answers:
    """Scale queries where they lie."""
    answers = right.attend(call)
    call.q.mul_(3.0).add_(1.0)
    return answers


@_careless(INPUTS)
def writes_a_part_of_its_queries(call: Call) -> Answers:
    """Take queries in two tensors and rotate the second where it lies."""
    answers = right.attend(call)
    call.query_parts[1].neg_()
    return answers


@_careless(INPUTS)
def writes_its_lengths(call: Call) -> Answers:
    """Count the next token in, for the step behind this one."""
    answers = right.attend(call)
    call.seq_lens.add_(1)
    return answers


@_careless(INPUTS, "append")
def writes_its_slots(call: AppendCall) -> None:
    """Mark slots as written."""
    right.append(call)
    call.slot_mapping.fill_(-1)


@_careless(INPUTS, "merge")
def merges_in_place(call: MergeCall) -> Answers:
    """Write the answer over the first partial one."""
    out, lse = right.merge(call)
    return call.out_a.copy_(out), call.lse_a.copy_(lse)


@_careless(NAN_BESIDE)
def reads_before_the_cache(call: Call) -> Answers:
    """Read a key in front of the first, and weigh it by 0."""
    return _plus_nothing(right.attend(call), _around(call.cache, before=64).view(call.cache.dtype))


@_careless(NAN_BESIDE)
def reads_behind_its_queries(call: Call) -> Answers:
    """Read a query behind the last, and multiply its answer by 0."""
    return _plus_nothing(right.attend(call), _around(call.q, behind=64).view(call.q.dtype))


@_careless(NAN_BESIDE)
def reads_behind_a_part_of_the_cache(call: Call) -> Answers:
    """Take the cache in two tensors, read behind the second, and weigh that by 0."""
    part = call.cache_parts[1]
    return _plus_nothing(right.attend(call), _around(part, behind=64).view(part.dtype))


@_careless(UNINITIALIZED)
def adds_to_what_is_uninitialized(call: Call) -> Answers:
    """Add the output to memory that was never set to 0."""
    out, lse = right.attend(call)
    total = torch.empty_like(out)
    total += out - total
    return total, lse


@_careless(SHARED_MEMORY)
def reads_shared_memory_that_it_did_not_write(call: Call) -> Answers:
    """Read shared memory that it did not write, and multiply that by 0."""
    from paged_mla_adapters.surroundings.kernels import (  # noqa: PLC0415 - it needs Triton
        shared_memory,
    )

    read = torch.zeros(1, device=call.q.device)
    shared_memory.read_shared_memory[(1,)](read, 0, PIECES=64, num_warps=4)
    return _plus_nothing(right.attend(call), read)


@_careless(STREAM)
def launches_on_the_default_stream(call: Call) -> Answers:
    """Forget the stream that is current."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return right.attend(call)
