"""Compute the oracle's outputs for a large step: on every core, or for some of its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.attention import Answer, AttendQuery, attend, attend_visible
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

_SHARES_PER_CORE = 8  # several, so that no core waits long for the last share
_FEW = 64  # steps of at most this many tokens run on one core


def both_answers(problem: Problem, batch: Batch, image: CacheImage) -> tuple[Answer, Answer]:
    """Return the outputs of all tokens: exact, and rounded where the rules round (S-5)."""
    cores = os.cpu_count() or 1
    shares = 1 if batch.num_tokens <= _FEW else cores * _SHARES_PER_CORE

    def answer(share: int) -> tuple[Answer, ...]:
        asked = np.arange(batch.num_tokens) % shares == share
        return tuple(attend(problem, batch, image, r, asked) for r in Rounding)

    with ThreadPoolExecutor(cores) as pool:  # NumPy releases the interpreter's lock
        found = list(pool.map(answer, range(shares)))
    exact, rounded = (_joined([pair[i] for pair in found]) for i in range(len(Rounding)))
    return exact, rounded


def _joined(shares: list[Answer]) -> Answer:
    """Merge n shares; share i has computed the tokens i, i + n, i + 2 n, ..."""
    whole = shares[0]
    for number, share in enumerate(shares[1:], 1):
        for name, array in vars(whole).items():
            array[number :: len(shares)] = getattr(share, name)[number :: len(shares)]
    return whole


@dataclass(frozen=True)
class Sample:
    """An oracle that recomputes only the tokens that a fault changes, and only some of these.

    A token that a fault does not change gets the right output. A token that a fault changes
    gets NaN if `asked` does not select it, since its output is unknown.

    Parameters
    ----------
    problem, batch, image : Problem, Batch, CacheImage
        The step.
    right : Output
        The step's right output, rounded where the rules round.
    asked : bool [T]
        The tokens to recompute if a fault changes them.
    """

    problem: Problem
    batch: Batch
    image: CacheImage
    right: Output
    asked: NDArray[np.bool_]

    def oracle(self) -> Oracle:
        """Return the oracle: the right one, with this sample's attention."""
        return replace(RIGHT, attend=self.attend, attend_visible=self.attend_visible)

    def attend(self, problem: Problem, batch: Batch, image: CacheImage) -> Output:
        """Compute the output of a batch, which a fault may have changed (S-4 to S-7)."""
        changed = self._changed(problem, batch, image)
        if not changed.any():
            return Output(self.right.out.copy(), self.right.lse.copy())
        asked = changed & self.asked
        found = attend(problem, batch, image, Rounding.SPEC, asked)
        return self._known(found.output(problem.dtype), changed)

    def attend_visible(
        self,
        problem: Problem,
        batch: Batch,
        image: CacheImage,
        visible: Sequence[NDArray[np.bool_]],
        attend_query: AttendQuery | None = None,
    ) -> Output:
        """Compute the output over other keys, or with other arithmetic (S-5 to S-7)."""
        changed = np.ones(batch.num_tokens, bool)
        if attend_query is None and problem is self.problem and image is self.image:
            seen = zip(visible, visibility(problem, batch), strict=True)
            lines = [_differ(mine, theirs) for mine, theirs in seen]
            live = np.concatenate([np.zeros(0, bool), *lines])
            changed[:] = False
            changed[: len(live)] = live
        asked = changed & self.asked
        found = attend_visible(
            problem, batch, image, visible, asked=asked, attend_query=attend_query
        )
        return self._known(found.output(problem.dtype), changed)

    def _known(self, found: Output, changed: NDArray[np.bool_]) -> Output:
        """Return `found` for changed tokens, and the right output for all other tokens.

        Changed tokens that `asked` does not select get NaN.
        """
        out = np.where(changed[:, None, None], found.out, self.right.out)
        lse = np.where(changed[:, None], found.lse, self.right.lse)
        unknown = changed & ~self.asked
        out[unknown], lse[unknown] = np.nan, np.nan
        return Output(out, lse)

    def _changed(self, problem: Problem, batch: Batch, image: CacheImage) -> NDArray[np.bool_]:
        """Return which tokens have other inputs than in the step, bool [T]."""
        mine, tokens = self.batch, self.batch.num_tokens
        same_shape = np.array_equal(batch.cu_seqlens_q, mine.cu_seqlens_q)
        if problem is not self.problem or image is not self.image or not same_shape:
            return np.ones(tokens, bool)
        if batch.mask is not mine.mask or batch.q_pe.dtype != mine.q_pe.dtype:
            return np.ones(tokens, bool)
        rows = batch.seq_lens != mine.seq_lens
        if batch.block_table is not mine.block_table:
            rows |= _tables_differ(problem, mine, batch)
        changed = np.zeros(tokens, bool)
        live = int(mine.cu_seqlens_q[-1])
        changed[:live] = np.repeat(rows, mine.query_lens)
        for name in ("q_nope", "q_pe"):
            other, own = getattr(batch, name), getattr(mine, name)
            if other is not own:
                changed |= (other != own).any(axis=(1, 2))
        return changed


def _differ(mine: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which queries of a row see other keys, bool [q]."""
    shared = min(mine.shape[1], theirs.shape[1])
    differ: NDArray[np.bool_] = (mine[:, :shared] != theirs[:, :shared]).any(axis=1)
    return differ | mine[:, shared:].any(axis=1) | theirs[:, shared:].any(axis=1)


def _tables_differ(problem: Problem, mine: Batch, other: Batch) -> NDArray[np.bool_]:
    """Return which rows have other blocks in the table entries that they use, bool [B]."""
    columns = min(mine.block_table.shape[1], other.block_table.shape[1])
    used = -(-mine.seq_lens.astype(np.int64) // problem.block_size)
    inside = np.arange(columns) < used[:, None]
    differ = (mine.block_table[:, :columns] != other.block_table[:, :columns]) & inside
    return np.asarray(differ.any(axis=1) | (used > columns))
