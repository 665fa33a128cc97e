"""Right backends that speak as engines do: one factory for each convention of theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.paging import blocks_of, keys_of_tokens
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output


class Saying(ForwardingRunner, ABC):
    """It says every answer in the same way of its own."""

    @abstractmethod
    def said(self, answer: Output) -> Output:
        """Return an answer as it is said."""

    def attend(self, batch: Batch) -> Output:
        """Say it."""
        return self.said(self.inner.attend(batch))

    def prefill(self, batch: PrefillBatch) -> Output:
        """Say it."""
        return self.said(self.inner.prefill(batch))

    def layer(self, batch: LayerBatch) -> Output:
        """Say it."""
        return self.said(self.inner.layer(batch))


class Base2(Saying):
    """Its lse, and that of partials, is in bits."""

    def said(self, answer: Output) -> Output:
        """Divide by ln 2."""
        return Output(answer.out, (answer.lse / np.log(2)).astype(np.float32))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge nats."""
        nats = [Output(p.out, p.lse * np.float32(np.log(2))) for p in partials]
        return self.said(self.inner.merge(nats))


class HeadsFirst(Saying):
    """Its lse, and that of partials, is [H, T]."""

    def said(self, answer: Output) -> Output:
        """Transpose."""
        return Output(answer.out, np.ascontiguousarray(answer.lse.T))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Transpose both ways."""
        return self.said(self.inner.merge([self.said(partial) for partial in partials]))


class PlusInfinity(Saying):
    """A query that sees nothing has lse +inf."""

    def said(self, answer: Output) -> Output:
        """Turn the sign."""
        return Output(answer.out, np.where(np.isinf(answer.lse), -answer.lse, answer.lse))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Turn the sign both ways."""
        return self.said(self.inner.merge([self.said(partial) for partial in partials]))


class Silent(Saying):
    """It has no lse."""

    def said(self, answer: Output) -> Output:
        """Return NaN for it."""
        return Output(answer.out, np.full_like(answer.lse, np.nan))


class TableOfIds(ForwardingRunner):
    """It reads every entry of the table as an address."""

    def attend(self, batch: Batch) -> Output:
        """Refuse what is no id."""
        assert ((batch.block_table >= 0) & (batch.block_table < self.problem.num_blocks)).all()
        return self.inner.attend(batch)


class EmptyRowsAreNaN(ForwardingRunner):
    """Nobody reads what rows without a request get."""

    def attend(self, batch: Batch) -> Output:
        """Divide zero by zero."""
        answer = self.inner.attend(batch)
        return _nan_where(np.isneginf(answer.lse), answer)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Divide zero by zero where a row has no key."""
        keyless = keys_of_tokens(batch)[:, None] == 0
        return _nan_where(keyless, self.inner.prefill(batch))

    def layer(self, batch: LayerBatch) -> Output:
        """Divide zero by zero."""
        answer = self.inner.layer(batch)
        return _nan_where(np.isneginf(answer.lse), answer)


class Vllm(HeadsFirst, EmptyRowsAreNaN, TableOfIds):
    """The lse of partials is [H, T], that of answers [T, H]; block 0 holds nothing."""

    def append(self, batch: Batch) -> None:
        """Refuse block 0."""
        live = batch.seq_lens > 0
        assert (batch.block_table[live, 0] > 0).all()
        self.inner.append(batch)

    def attend(self, batch: Batch) -> Output:
        """Attend."""
        TableOfIds.attend(self, batch)
        return EmptyRowsAreNaN.attend(self, batch)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to keys and values."""
        return EmptyRowsAreNaN.prefill(self, batch)

    def layer(self, batch: LayerBatch) -> Output:
        """Append and attend, between a layer's projections."""
        return EmptyRowsAreNaN.layer(self, batch)


class Sglang(TableOfIds):
    """Slot 0 is no slot, every token has one, and no row has length 0 but in trees."""

    def plan(self, batch: Batch) -> Metadata:
        """Skip slot 0."""
        return self.inner.plan(self._shown(batch))

    def append(self, batch: Batch) -> None:
        """Skip slot 0."""
        self.inner.append(self._shown(batch))

    def attend(self, batch: Batch) -> Output:
        """Refuse rows of length 0."""
        assert batch.mask is not None or (batch.seq_lens > 0).all()
        return super().attend(self._shown(batch))

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Skip slot 0."""
        return self.inner.quantize_queries(self._shown(batch), scale)

    def layer(self, batch: LayerBatch) -> Output:
        """Skip slot 0."""
        return super().layer(replace(batch, step=self._shown(batch.step)))

    def _shown(self, batch: Batch) -> Batch:
        """Skip slot 0; rows of several blocks that are all block 0 are padding."""
        slots = batch.slot_mapping
        assert slots is not None
        assert (slots >= 0).all()
        seq_lens = batch.seq_lens.copy()
        for row, seq_len in enumerate(seq_lens.tolist()):
            used = batch.block_table[row, : blocks_of(seq_len, self.problem.block_size)]
            if len(used) > 1 and not used.any():
                seq_lens[row] = 0
        return replace(batch, seq_lens=seq_lens, slot_mapping=np.where(slots == 0, -1, slots))


def _nan_where(empty: NDArray[np.bool_], answer: Output) -> Output:
    return Output(
        np.where(empty[..., None], np.array(np.nan, answer.out.dtype), answer.out),
        np.where(empty, np.float32(np.nan), answer.lse),
    )


SPEAKERS: dict[str, type[ForwardingRunner]] = {
    "base-2": Base2,
    "heads-first": HeadsFirst,
    "table-of-ids": TableOfIds,
    "empty-rows-are-nan": EmptyRowsAreNaN,
    "vllm": Vllm,
    "sglang": Sglang,
    "fastdeploy": Silent,
    "flashmla": PlusInfinity,
}


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of a speaker."""
    if name not in SPEAKERS:
        raise AttributeError(name)
    return lambda: MutantBackend(name=name, wrap=SPEAKERS[name])
