"""A kernel that lets the next one start early, and writes what that one reads late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

Answers = tuple[torch.Tensor, ...]
PROGRAMS = 32  # so few that a kernel behind finds room on every GPU while they wait


@triton.jit
def late_kernel(target_ptr, source_ptr, count, nanoseconds, SIZE: tl.constexpr):
    """Let dependent kernels launch, wait, then copy bytes."""
    tl.extra.cuda.gdc_launch_dependents()
    end = tl.extra.cuda.globaltimer() + nanoseconds
    while tl.extra.cuda.globaltimer() < end:
        pass
    for begin in range(tl.program_id(0) * SIZE, count, tl.num_programs(0) * SIZE):
        at = begin + tl.arange(0, SIZE).to(tl.int64)
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def hasty_kernel(target_ptr, source_ptr, count, SIZE: tl.constexpr):
    """Copy bytes, launched early, without waiting for the kernel before."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def write_late(target: torch.Tensor, source: torch.Tensor, microseconds: int) -> None:
    """Launch the copy of `source` to `target`; it signals at once and writes after the wait."""
    to, of = flat_bytes(target), flat_bytes(source)
    late_kernel[PROGRAMS,](to, of, len(to), microseconds * 1000, SIZE=4096)


def copy_hastily(target: torch.Tensor, source: torch.Tensor) -> None:
    """Launch a copy that begins as soon as the kernel before signals."""
    to, of = flat_bytes(target), flat_bytes(source)
    hasty_kernel[triton.cdiv(len(to), 4096),](to, of, len(to), SIZE=4096, launch_pdl=True)


@dataclass
class Operation:
    """A call, what it reads, and what it wrote.

    Parameters
    ----------
    reset : callable
        Overwrite what `run` writes, and restore caches to their state before it.
    run : callable
        The call.
    answers : callable
        Return all that `run` wrote.
    inputs : dict of str to (Tensor, stale Tensor)
        What comes late in turn: a contiguous tensor that `run` reads, and legal contents of the
        same shape with which the outputs differ.
    """

    reset: Callable[[], None]
    run: Callable[[], None]
    answers: Callable[[], Answers]
    inputs: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def expected(self) -> Answers:
        """Run behind everything else; return copies of what it wrote."""
        self.reset()
        torch.cuda.synchronize()
        self.run()
        return tuple(answer.clone() for answer in self.answers())

    def behind_late(self, name: str, *, captured: bool) -> list[Answers]:
        """Run behind a kernel that writes input `name` late; return what each of three runs wrote.

        Eagerly that kernel waits for a millisecond, longer than the host takes to launch what
        comes behind it; in a graph for 100 microseconds.
        """
        tensor, stale = self.inputs[name]
        right = tensor.clone()

        def step() -> None:
            write_late(tensor, right, 100 if captured else 1000)
            self.run()

        step()  # so that all is compiled
        start = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            start = graph.replay
        runs = []
        for _ in range(3):
            self.reset()
            tensor.copy_(stale)
            torch.cuda.synchronize()
            start()
            runs.append(tuple(answer.clone() for answer in self.answers()))
            torch.cuda.synchronize()
            assert torch.equal(flat_bytes(tensor), flat_bytes(right))
        return runs
