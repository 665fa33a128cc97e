"""Right backends with the conventions of engines: one factory for each convention."""

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
    """Translates every output to one convention."""

    @abstractmethod
    def said(self, answer: Output) -> Output:
        """Return an output in the convention."""

    def attend(self, batch: Batch) -> Output:
        """Return the output of attention in the convention."""
        return self.said(self.inner.attend(batch))

    def prefill(self, batch: PrefillBatch) -> Output:
        """Return the output of a prefill in the convention."""
        return self.said(self.inner.prefill(batch))

    def layer(self, batch: LayerBatch) -> Output:
        """Return the output of a layer in the convention."""
        return self.said(self.inner.layer(batch))


class Base2(Saying):
    """Every lse has base 2, also in partial results."""

    def said(self, answer: Output) -> Output:
        """Divide the lse by ln 2."""
        return Output(answer.out, (answer.lse / np.log(2)).astype(np.float32))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge partial results in base 2."""
        nats = [Output(p.out, p.lse * np.float32(np.log(2))) for p in partials]
        return self.said(self.inner.merge(nats))


class HeadsFirst(Saying):
    """Every lse is [H, T], also in partial results."""

    def said(self, answer: Output) -> Output:
        """Transpose the lse."""
        return Output(answer.out, np.ascontiguousarray(answer.lse.T))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Transpose the lse before and after the merge."""
        return self.said(self.inner.merge([self.said(partial) for partial in partials]))


class PlusInfinity(Saying):
    """A query that sees no key has lse +inf."""

    def said(self, answer: Output) -> Output:
        """Change the sign of every infinite lse."""
        return Output(answer.out, np.where(np.isinf(answer.lse), -answer.lse, answer.lse))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Change the sign of every infinite lse before and after the merge."""
        return self.said(self.inner.merge([self.said(partial) for partial in partials]))


class Silent(Saying):
    """Returns no lse."""

    def said(self, answer: Output) -> Output:
        """Replace the lse by NaN."""
        return Output(answer.out, np.full_like(answer.lse, np.nan))


class TableOfIds(ForwardingRunner):
    """Uses every entry of the table as a block id."""

    def attend(self, batch: Batch) -> Output:
        """Check that every entry is a valid id, and attend."""
        assert ((batch.block_table >= 0) & (batch.block_table < self.problem.num_blocks)).all()
        return self.inner.attend(batch)


class EmptyRowsAreNaN(ForwardingRunner):
    """Returns NaN for rows without a request."""

    def attend(self, batch: Batch) -> Output:
        """Return NaN where the lse is -inf."""
        answer = self.inner.attend(batch)
        return _nan_where(np.isneginf(answer.lse), answer)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Return NaN for tokens that see no key."""
        keyless = keys_of_tokens(batch)[:, None] == 0
        return _nan_where(keyless, self.inner.prefill(batch))

    def layer(self, batch: LayerBatch) -> Output:
        """Return NaN where the lse is -inf."""
        answer = self.inner.layer(batch)
        return _nan_where(np.isneginf(answer.lse), answer)


class Vllm(HeadsFirst, EmptyRowsAreNaN, TableOfIds):
    """The lse of partial results is [H, T], that of outputs [T, H]; block 0 is not used."""

    def append(self, batch: Batch) -> None:
        """Check that no row uses block 0, and append."""
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
        """Run a layer."""
        return EmptyRowsAreNaN.layer(self, batch)


class Sglang(TableOfIds):
    """Padded tokens have slot 0, and only steps with tree masks have rows of length 0."""

    def plan(self, batch: Batch) -> Metadata:
        """Plan without the tokens at slot 0."""
        return self.inner.plan(self._shown(batch))

    def append(self, batch: Batch) -> None:
        """Append without the tokens at slot 0."""
        self.inner.append(self._shown(batch))

    def attend(self, batch: Batch) -> Output:
        """Check that no row has length 0, and attend."""
        assert batch.mask is not None or (batch.seq_lens > 0).all()
        return super().attend(self._shown(batch))

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Quantize queries without the tokens at slot 0."""
        return self.inner.quantize_queries(self._shown(batch), scale)

    def layer(self, batch: LayerBatch) -> Output:
        """Run a layer without the tokens at slot 0."""
        return super().layer(replace(batch, step=self._shown(batch.step)))

    def _shown(self, batch: Batch) -> Batch:
        """Return the batch with -1 for slot 0; rows whose several blocks are all 0 get length 0."""
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
    """Return the factory of a backend by its name."""
    if name not in SPEAKERS:
        raise AttributeError(name)
    return lambda: MutantBackend(name=name, wrap=SPEAKERS[name])
