"""Kernels in plain torch, right ones and wrong ones, as backends on a CPU or a GPU.

Each wrong one does one thing that no kernel may do, to memory that its surroundings own.
"""

from __future__ import annotations

import torch

from paged_mla_adapters.declared import capabilities
from paged_mla_adapters.kernel import Call, KernelBackend


def attend(call: Call):
    """Return softmax(q k) v for one query token a row."""
    size, rank = call.problem.block_size, call.problem.dims.kv_lora_rank
    out = call.buffer("the output", (*call.q.shape[:2], rank), call.q.dtype)
    lse = call.buffer("the lse", call.q.shape[:2])
    for row, length in enumerate(call.seq_lens.tolist()):
        blocks = call.block_table[row, : -(-length // size)].long()
        keys = call.cache[blocks].flatten(0, 1)[:length].float()
        scores = call.problem.softmax_scale * call.q[row].float() @ keys.mT
        lse[row] = scores.logsumexp(-1)
        out[row] = (scores.softmax(-1) @ keys[:, :rank]).to(out.dtype)
    return out, lse


def writes_before_the_cache(call: Call):
    """Write 64 bytes in front of the cache."""
    everything(call.cache)[first_byte(call.cache) - 64 : first_byte(call.cache)] = 0
    return attend(call)


def writes_behind_the_cache(call: Call):
    """Write a byte 100 bytes behind the cache."""
    everything(call.cache)[first_byte(call.cache) + call.problem.layout.storage_bytes + 100] = 0
    return attend(call)


def writes_its_queries(call: Call):
    """Scale queries where they lie, and back: the answer is right, the queries are rounded."""
    answer = attend(call)
    call.q.mul_(3.0).add_(1.0)
    return answer


def writes_behind_its_output(call: Call):
    """Write a word behind the output."""
    out, lse = attend(call)
    everything(out)[first_byte(out) + out.nbytes : first_byte(out) + out.nbytes + 4] = 1
    return out, lse


def adds_to_what_is_uninitialized(call: Call):
    """Add up an answer where nobody put a 0."""
    out, lse = attend(call)
    total = torch.empty_like(out)
    total += out - total
    return total, lse


def reads_shared_memory_that_it_did_not_write(call: Call):
    """Add what lies in shared memory, times 0."""
    import reading_kernels  # noqa: PLC0415 - it needs Triton

    out, lse = attend(call)
    read = torch.zeros(1, device=out.device)
    reading_kernels.read_shared_memory[(1,)](read, 0, PIECES=64, num_warps=4)
    return out + 0 * read.nan_to_num(nan=torch.nan, posinf=0.0, neginf=0.0), lse


def launches_on_the_default_stream(call: Call):
    """Forget the stream that is current."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return attend(call)


def has_no_memory(_call: Call):
    """Ask for more than any device has."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")


def everything(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole allocation that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def first_byte(tensor: torch.Tensor) -> int:
    """Return where in its allocation a tensor begins."""
    return tensor.storage_offset() * tensor.element_size()


def backend_of(kernel) -> KernelBackend:
    """Return a backend of float32, on a GPU if there is one, else where the interpreter runs."""
    declared = capabilities(frozenset({"float32"}), head_dims=((32, 16),))
    return KernelBackend(name=kernel.__name__, version="0", kernel=kernel, capabilities=declared)


def __getattr__(name: str):
    """Return the factory of the backend of a kernel, by the kernel's name behind ``of_``."""
    kernel = globals().get(name.removeprefix("of_"))
    if not name.startswith("of_") or kernel is None:
        raise AttributeError(name)
    return lambda: backend_of(kernel)
