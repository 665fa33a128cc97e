"""Backends whose device has too little memory for steps with 9 heads."""

from __future__ import annotations

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.backend import Runner
from paged_mla_shared.errors import OutOfMemory
from paged_mla_shared.problem import Batch, Output, Problem


class _Small(ForwardingRunner):
    def attend(self, batch: Batch) -> Output:
        """Attend, except with 9 heads."""
        if self.problem.dims.num_heads == 9:
            raise OutOfMemory("8 heads fit")
        return self.inner.attend(batch)


class OutOfMemoryError(RuntimeError):
    """An error with the name that libraries use."""


class _SmallInItsWords(ForwardingRunner):
    def attend(self, batch: Batch) -> Output:
        """Attend, except with 9 heads."""
        if self.problem.dims.num_heads == 9:
            raise OutOfMemoryError("8 heads fit")
        return self.inner.attend(batch)


class _Tiny(ForwardingRunner):
    def attend(self, batch: Batch) -> Output:
        """Raise ``OutOfMemory`` in every call."""
        raise OutOfMemory(f"{batch.num_tokens} tokens do not fit")


def _no_large_blocks(problem: Problem, runner: Runner) -> Runner:
    if problem.block_size >= 4:
        raise OutOfMemory(f"blocks of {problem.block_size} tokens do not fit")
    return runner


def in_prepare() -> MutantBackend:
    return MutantBackend(name="tiny", wrap=_no_large_blocks)


def everywhere() -> MutantBackend:
    return MutantBackend(name="tiny", wrap=_Tiny)


def create() -> MutantBackend:
    return MutantBackend(name="small", wrap=_Small)


def in_the_words_of_a_library() -> MutantBackend:
    return MutantBackend(name="small", wrap=_SmallInItsWords)
