"""Backends that break one rule each; the suite must fail every one of them by that rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.backend import ReferenceBackend
from paged_mla_shared.backend import Runner
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem

Wrap = Callable[[Problem, Runner], Runner]


@dataclass(frozen=True)
class WrongBackend(ReferenceBackend):
    """The reference with its runners wrapped."""

    name: str = "wrong"
    wrap: Wrap = lambda _, runner: runner
    spoil_problem: Callable[[Problem], Problem] = lambda problem: problem

    def prepare(self, problem: Problem) -> Runner:
        """Build a runner that breaks a rule."""
        return self.wrap(problem, super().prepare(self.spoil_problem(problem)))


class Passing:
    """A runner that hands every call on; subclasses change one."""

    def __init__(self, problem: Problem, inner: Runner) -> None:
        self.problem, self.inner = problem, inner

    def load_cache(self, image: CacheImage) -> None:
        self.inner.load_cache(image)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.inner.read_cache(block_ids)

    def plan(self, batch: Batch) -> Metadata:
        return self.inner.plan(batch)

    def append(self, batch: Batch) -> None:
        self.inner.append(batch)

    def attend(self, batch: Batch) -> Output:
        return self.inner.attend(batch)

    def merge(self, partials: Sequence[Output]) -> Output:
        return self.inner.merge(partials)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.inner.gather_context(batch)


class Base2Lse(Passing):
    def attend(self, batch: Batch) -> Output:
        answer = self.inner.attend(batch)
        return Output(answer.out, (answer.lse / np.log(2)).astype(np.float32))


class TransposedLse(Passing):
    def attend(self, batch: Batch) -> Output:
        answer = self.inner.attend(batch)
        return Output(answer.out, answer.lse.T.reshape(answer.lse.shape))


class ShorterRows(Passing):
    """Every key range is one key short, as if the step's own token were not counted."""

    def attend(self, batch: Batch) -> Output:
        short = np.maximum(batch.seq_lens - 1, batch.query_lens).astype(np.int32)
        return self.inner.attend(replace(batch, seq_lens=short))


class PageOrderIgnored(Passing):
    def attend(self, batch: Batch) -> Output:
        table = batch.block_table.copy()
        for b, seq_len in enumerate(batch.seq_lens):
            used = -(-int(seq_len) // self.problem.block_size)
            table[b, :used] = np.sort(table[b, :used])
        return self.inner.attend(replace(batch, block_table=table))


class EmptyRowsAreNan(Passing):
    def attend(self, batch: Batch) -> Output:
        answer = self.inner.attend(batch)
        out = answer.out.copy()
        out[np.isneginf(answer.lse)] = np.nan
        return Output(out, answer.lse)


class EmptyRowsAreStale(Passing):
    def attend(self, batch: Batch) -> Output:
        answer = self.inner.attend(batch)
        out = answer.out.copy()
        out[np.isneginf(answer.lse)] = 0.25
        return Output(out, answer.lse)


class StaleLengths(Passing):
    """The first step's lengths stay, as a value recorded at capture would."""

    first: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        if self.first is None:
            self.first = batch.seq_lens
        if len(self.first) == len(batch.seq_lens):
            kept = np.minimum(self.first, batch.seq_lens)
            batch = replace(batch, seq_lens=np.maximum(kept, batch.query_lens))
        return self.inner.attend(batch)


class PaddedTokensWriteSlot0(Passing):
    def append(self, batch: Batch) -> None:
        slots = self.inner.plan(batch).slot_mapping
        if batch.slot_mapping is None and (slots == -1).any() and 0 not in slots:
            slots[np.flatnonzero(slots == -1)[0]] = 0
            batch = replace(batch, slot_mapping=slots)
        self.inner.append(batch)


class LastTokenNotWritten(Passing):
    def append(self, batch: Batch) -> None:
        slots = self.inner.plan(batch).slot_mapping
        live = np.flatnonzero(slots >= 0)
        slots[live[-1:]] = -1
        self.inner.append(replace(batch, slot_mapping=slots))


class PositionsFromTheChunk(Passing):
    def plan(self, batch: Batch) -> Metadata:
        right = self.inner.plan(batch)
        return Metadata(np.maximum(right.positions - 1, 0), right.slot_mapping)


class NanWeighs(Passing):
    """An empty partial is multiplied by 0, which NaN survives."""

    def merge(self, partials: Sequence[Output]) -> Output:
        answer = self.inner.merge(partials)
        return Output(answer.out + sum(0 * p.out for p in partials), answer.lse)


class FutureSeen(Passing):
    """Causal rows see the whole row."""

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        if problem.mask is Mask.CAUSAL:
            self.blind = ReferenceBackend().prepare(replace(problem, mask=Mask.NON_CAUSAL))

    def load_cache(self, image: CacheImage) -> None:
        super().load_cache(image)
        if self.problem.mask is Mask.CAUSAL:
            self.blind.load_cache(image)

    def append(self, batch: Batch) -> None:
        super().append(batch)
        if self.problem.mask is Mask.CAUSAL:
            self.blind.append(batch)

    def attend(self, batch: Batch) -> Output:
        causal = self.problem.mask is Mask.CAUSAL
        return self.blind.attend(batch) if causal else self.inner.attend(batch)


class SiblingsSeen(Passing):
    """A tree is read as a chain: every earlier draft is visible."""

    def attend(self, batch: Batch) -> Output:
        if self.problem.mask is Mask.TREE and batch.mask is not None:
            flat = [np.tril(np.ones((n, n), bool)).ravel() for n in batch.query_lens]
            batch = replace(batch, mask=np.concatenate(flat))
        return self.inner.attend(batch)


class AcceptsAnything(Passing):
    """Refuses nothing: errors become silence."""

    def append(self, batch: Batch) -> None:
        try:
            self.inner.append(batch)
        except ValueError:
            return

    def plan(self, batch: Batch) -> Metadata:
        try:
            return self.inner.plan(batch)
        except ValueError:
            none = np.zeros(0, np.int64)
            return Metadata(none, none)


def wrong_scale(problem: Problem) -> Problem:
    """Scale by the absorbed width, (R + P) ** -0.5."""
    return replace(problem, softmax_scale=problem.dims.cached_dim**-0.5)


def unit_rows() -> WrongBackend:
    """Return a backend that lacks a core capability and says so."""
    whole = WrongBackend()
    less = replace(whole.capabilities, masks=frozenset({"causal"}))
    return WrongBackend(name="causal-only", capabilities=less)


def base_2_lse() -> WrongBackend:
    """Return the backend whose lse is base 2."""
    return WrongBackend(name="base-2-lse", wrap=Base2Lse)


def positions_from_the_chunk() -> WrongBackend:
    """Return the backend whose positions are one behind."""
    return WrongBackend(name="positions-from-the-chunk", wrap=PositionsFromTheChunk)
