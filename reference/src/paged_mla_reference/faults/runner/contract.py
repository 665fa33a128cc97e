"""Runners that break the backend protocol: accepted input, shared state, returned arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, runner_fault
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.cache import slots_to_write
from paged_mla_shared.backend import Runner
from paged_mla_shared.formats import FORMATS, ScaleTensor
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, MaskSpelling, Metadata, Output, Problem

SCALED = ("S-11", "S-17", "S-10", "S-5", "S-7", "S-1", "S-21")  # detect a wrong cache scale
REFUSED = ("S-1", "S-2", "S-14")  # rules of the group of bad inputs

_MOST_BLOCKS = 4096  # of a cache that is read and written as a whole


@runner_fault(FaultClass.VALIDATION, *REFUSED, cites="flashinfer#3176 vllm#32628")
class BadInputIsSwallowed(ForwardingRunner):
    """Plans and appends accept bad input without an error."""

    def append(self, batch: Batch) -> None:
        """Append, and ignore errors."""
        try:
            self.inner.append(batch)
        except ValueError:
            return

    def plan(self, batch: Batch) -> Metadata:
        """Plan, and return an empty plan after an error."""
        try:
            return self.inner.plan(batch)
        except ValueError:
            none = np.zeros(0, np.int64)
            return Metadata(none, none)


@runner_fault(FaultClass.VALIDATION, *REFUSED, cites="flashinfer#3238")
class CapacityIsNotChecked(ForwardingRunner):
    """Batches larger than the prepared capacity are accepted without an error."""

    def plan(self, batch: Batch) -> Metadata:
        """Raise only errors that are not about capacity."""
        try:
            return self.inner.plan(batch)
        except ValueError as error:
            if "max_" not in str(error):
                raise
            return Metadata(np.zeros(0, np.int64), np.zeros(0, np.int64))


@runner_fault(FaultClass.VALIDATION, *REFUSED, "S-8", "S-11", "S-21")
class OptionalCallsRefuseNothing(ForwardingRunner):
    """Layers, merges, gathers and 8-bit queries accept bad input without an error."""

    def layer(self, batch: LayerBatch) -> Output:
        """Return zeros for bad input."""
        try:
            return self.inner.layer(batch)
        except ValueError:
            return Output(np.zeros_like(batch.step.q_nope), np.zeros(0, np.float32))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Return empty arrays for bad input."""
        try:
            return self.inner.merge(partials)
        except ValueError:
            return Output(np.zeros((0, 0, 0), np.float32), np.zeros((0, 0), np.float32))

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return empty arrays for bad input."""
        try:
            return self.inner.gather_context(batch)
        except ValueError:
            return batch.ckv[:0], batch.k_pe[:0]

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return empty arrays for bad input."""
        try:
            return self.inner.quantize_queries(batch, scale)
        except ValueError:
            return np.zeros((0, 0, 0), np.uint8), np.zeros((0, 0), np.float32)


@runner_fault(FaultClass.VALIDATION, "S-21")
class CapacityOfPrefillsIsNotChecked(ForwardingRunner):
    """Prefills larger than the prepared capacity return zeros without an error."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Raise only errors that are not about capacity."""
        try:
            return self.inner.prefill(batch)
        except ValueError as error:
            if "max_" not in str(error):
                raise
            lines = batch.q_nope.shape[:2]
            out = np.zeros((*lines, batch.v.shape[-1]), batch.v.dtype)
            return Output(out, np.zeros(lines, np.float32))


@runner_fault(FaultClass.VALIDATION, *REFUSED)
class PackedTreesAreNotLookedAt(ForwardingRunner):
    """Packed masks are not validated: nodes may not see themselves, or may see later nodes."""

    def attend(self, batch: Batch) -> Output:
        """Return zeros instead of an error about nodes of a packed mask."""
        try:
            return self.inner.attend(batch)
        except ValueError as error:
            packed = self.problem.mask_spelling is MaskSpelling.PACKED
            if not packed or "a node" not in str(error):
                raise
            return Output(np.zeros_like(batch.q_nope), np.zeros(batch.q_nope.shape[:2], np.float32))


@runner_fault(FaultClass.VALIDATION, *REFUSED)
class BadBatchesAreWrittenBeforeTheyAreRefused(ForwardingRunner):
    """The cache is changed before a bad batch raises an error."""

    def append(self, batch: Batch) -> None:
        """Change block 0, then raise the error."""
        try:
            self.inner.append(batch)
        except ValueError:
            with _every_block(self.problem, self.inner) as blocks:
                blocks[0] ^= 1
            raise


@runner_fault(FaultClass.RANKS, "S-10", "S-18", akin="sglang@trtllm_mla_backend")
class EveryRankWritesEverything(ForwardingRunner):
    """Every rank writes all tokens, also those that it does not own."""

    def append(self, batch: Batch) -> None:
        """Write to every slot derived from the table, once."""
        if batch.slot_mapping is not None:
            derived = self.inner.plan(batch).slot_mapping
            _, first = np.unique(derived, return_index=True)
            slots = np.full_like(derived, -1)
            slots[first] = derived[first]
            batch = replace(batch, slot_mapping=slots)
        self.inner.append(batch)


@runner_fault(FaultClass.WRITE, "S-10")
class RotatedNeighboursLoseOneBit(ForwardingRunner):
    """An append that rotates keys changes one bit of a cached key of another token."""

    def append(self, batch: Batch) -> None:
        """Append, and change the last bit of a cached key of another token."""
        self.inner.append(batch)

        def spoil(k_pe: NDArray[Any], is_written: NDArray[np.bool_]) -> None:
            is_other = np.isfinite(k_pe.astype(np.float64)).all(axis=2) & ~is_written
            others = np.argwhere(is_other)[:1]
            k_pe.view(f"u{k_pe.itemsize}")[*others.T, 0] ^= 1

        _spoil_rotated(self.problem, self.inner, batch, spoil)


@runner_fault(FaultClass.PRECISION, "S-10", "S-11", "S-12")
class RotatedKeysAreOneStepDown(ForwardingRunner):
    """An append that rotates keys stores each element one rounding step nearer to zero."""

    def append(self, batch: Batch) -> None:
        """Append, and subtract one from the bits of the step's rotated keys."""
        self.inner.append(batch)

        def spoil(k_pe: NDArray[Any], is_written: NDArray[np.bool_]) -> None:
            numbers = k_pe.astype(np.float64)
            steps = np.isfinite(numbers) & (numbers != 0) & is_written[..., None]
            k_pe.view(f"u{k_pe.itemsize}")[steps] -= 1

        _spoil_rotated(self.problem, self.inner, batch, spoil)


@runner_fault(FaultClass.PRECISION, "S-11", "S-12")
class RotatedQueriesAreOneStepDown(ForwardingRunner):
    """The codes of the rotated part of 8-bit queries are one step nearer to zero."""

    def quantize_queries(
        self, batch: Batch, scale: float | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Quantize, and subtract one from the codes of the rotated part."""
        codes, scales = self.inner.quantize_queries(batch, scale)
        if self.problem.rope is not None:
            rotated = codes[..., self.problem.dims.kv_lora_rank :]
            rotated -= (rotated & 0x7F != 0).astype(np.uint8)
        return codes, scales


@runner_fault(FaultClass.STALE, "S-9", "S-10", cites="tt-metal#41195")
class AttentionWritesTheCache(ForwardingRunner):
    """Attention writes scratch data into the cache, in a block that no row uses."""

    def attend(self, batch: Batch) -> Output:
        """Attend, and change a byte of a block that no row uses."""
        answer = self.inner.attend(batch)
        _mark_a_free_block(self.problem, self.inner, batch)
        return answer


@runner_fault(FaultClass.STALE, "S-10")
class GatheringWritesTheCache(ForwardingRunner):
    """A gather writes scratch data into the cache, in a block that no row uses."""

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather, and change a byte of a block that no row uses."""
        found = self.inner.gather_context(batch)
        _mark_a_free_block(self.problem, self.inner, batch)
        return found


def _spoil_rotated(
    problem: Problem,
    inner: Runner,
    batch: Batch,
    spoil: Callable[[NDArray[Any], NDArray[np.bool_]], None],
) -> None:
    """Change the cached rotated keys if there is a rope and the cache is small.

    `spoil` takes the keys, [blocks, block_size, P], and the slots that the step wrote, bool
    [blocks, block_size]. It changes the keys in place.
    """
    layout = problem.layout
    if problem.rope is None or layout.num_blocks > _MOST_BLOCKS:
        return
    slots = slots_to_write(problem, batch)
    is_written = np.zeros((layout.num_blocks, layout.block_size), bool)
    is_written.reshape(-1)[slots[slots >= 0]] = True
    with _every_block(problem, inner) as blocks:
        spoil(layout.field(blocks, "k_pe"), is_written)


def _mark_a_free_block(problem: Problem, inner: Runner, batch: Batch) -> None:
    """Change a byte of a block that is not in the block table, if the cache is small."""
    if problem.layout.num_blocks > _MOST_BLOCKS:
        return
    free = np.setdiff1d(np.arange(problem.layout.num_blocks), batch.block_table)
    with _every_block(problem, inner) as blocks:
        blocks[free[:1], 0] ^= 1


@contextmanager
def _every_block(problem: Problem, inner: Runner) -> Iterator[NDArray[np.uint8]]:
    """Yield a copy of all blocks, and load the changed copy at the end of the context."""
    every = np.arange(problem.layout.num_blocks, dtype=np.int64)
    blocks = inner.read_cache(every).copy()
    yield blocks
    inner.load_cache(CacheImage(problem.layout, every, blocks, blocks[0][:4].copy()))


@runner_fault(FaultClass.STALE, "S-10")
class TheImageBecomesTheCache(ForwardingRunner):
    """The runner uses the loaded array as its cache, and appends write into the caller's array."""

    image: CacheImage

    def load_cache(self, image: CacheImage) -> None:
        """Load the image, and keep it."""
        self.inner.load_cache(image)
        self.image = image

    def append(self, batch: Batch) -> None:
        """Append, and write the cache into the image too."""
        self.inner.append(batch)
        self.image.blocks[...] = self.inner.read_cache(self.image.block_ids)


@runner_fault(FaultClass.SCALE, "S-5", "S-7", "S-17")
class TheScaleIsThatOfTheLastRunner(ForwardingRunner):
    """All runners of the process use the softmax scale of the problem that was prepared last."""

    scale = 1.0

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        type(self).scale = problem.softmax_scale

    def attend(self, batch: Batch) -> Output:
        """Multiply the queries by the ratio of the process's scale to the runner's."""
        factor = batch.q_nope.dtype.type(self.scale / self.problem.softmax_scale)
        scaled = replace(batch, q_nope=batch.q_nope * factor, q_pe=batch.q_pe * factor)
        return self.inner.attend(scaled)


class _TheCacheScaleIsThatOfTheProcess(ForwardingRunner):
    """Caches with one scale are written and read with a scale that the process shares."""

    scale = 1.0

    def append(self, batch: Batch) -> None:
        """Append latents and keys that are scaled so that the shared scale applies."""
        ckv, k_pe = (times(x, 1 / self._factor) for x in (batch.ckv, batch.k_pe))
        self.inner.append(replace(batch, ckv=ckv, k_pe=k_pe))

    def attend(self, batch: Batch) -> Output:
        """Attend with scaled queries, and scale the output."""
        q_nope, q_pe = (times(x, self._factor) for x in (batch.q_nope, batch.q_pe))
        answer = self.inner.attend(replace(batch, q_nope=q_nope, q_pe=q_pe))
        return Output(times(answer.out, self._factor), answer.lse)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather, and scale the latents and keys."""
        ckv, k_pe = self.inner.gather_context(batch)
        return times(ckv, self._factor), times(k_pe, self._factor)

    def layer(self, batch: LayerBatch) -> Output:
        """Run the layer with scaled queries and weights."""
        step = replace(batch.step, q_pe=times(batch.step.q_pe, self._factor))
        weights = times(batch.kv_b_proj, self._factor)
        return self.inner.layer(replace(batch, step=step, kv_b_proj=weights))

    @property
    def _factor(self) -> float:
        stored = FORMATS[self.problem.cache_format]
        kept = stored.scale_tensor is ScaleTensor.SCALAR
        return self.scale / self.problem.cache_scale if kept else 1.0


def times(array: NDArray[Any], factor: float) -> NDArray[Any]:
    """Return an array times a factor; a factor of 1 returns the array itself."""
    return array if factor == 1 else array * array.dtype.type(factor)


def rounded_otherwise(answer: Output) -> Output:
    """Return an output whose elements are one float32 nearer to zero."""
    return Output(np.nextafter(answer.out, np.float32(0)), answer.lse)


@runner_fault(FaultClass.SCALE, *SCALED)
class TheCacheScaleIsThatOfTheLastRunner(_TheCacheScaleIsThatOfTheProcess):
    """All runners of the process use the layer's scale of the problem prepared last."""

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        type(self).scale = problem.cache_scale


@runner_fault(FaultClass.SCALE, *SCALED)
class TheCacheScaleIsThatOfTheLastWrite(_TheCacheScaleIsThatOfTheProcess):
    """All runners of the process use the scale of the runner that last loaded or appended."""

    def load_cache(self, image: CacheImage) -> None:
        """Load, and set the process's scale to the runner's."""
        type(self).scale = self.problem.cache_scale
        self.inner.load_cache(image)

    def append(self, batch: Batch) -> None:
        """Append, and set the process's scale to the runner's."""
        type(self).scale = self.problem.cache_scale
        self.inner.append(batch)


@runner_fault(FaultClass.PRECISION, "S-5")
class LayersAnswerInFloat64(ForwardingRunner):
    """A layer returns its output in float64 instead of the problem's dtype."""

    def layer(self, batch: LayerBatch) -> Output:
        """Return the output in float64."""
        answer = self.inner.layer(batch)
        return Output(answer.out.astype(np.float64), answer.lse)


@runner_fault(
    FaultClass.BATCH_MATE, "S-4", "S-17", "S-19", "S-20", cites="FlashMLA#212 sglang#12000"
)
class BitsDependOnTheFirstRow(ForwardingRunner):
    """The last bit of every output depends on the latent of the batch's last token."""

    def attend(self, batch: Batch) -> Output:
        """Raise every output by one unit in the last place if that latent is positive."""
        answer = self.inner.attend(batch)
        live = int(batch.cu_seqlens_q[-1])
        if live and batch.ckv[live - 1, 0] > 0:
            return Output(np.nextafter(answer.out, np.float32(np.inf)), answer.lse)
        return answer


@runner_fault(FaultClass.BATCH_MATE, "S-20")
class SplitsFollowTheLongestRow(ForwardingRunner):
    """The order of summation, and so the last bit, depends on the longest row of the batch."""

    def attend(self, batch: Batch) -> Output:
        """Round differently if a row is longer than four blocks."""
        answer = self.inner.attend(batch)
        if batch.seq_lens.max(initial=0) > 4 * self.problem.block_size:
            return rounded_otherwise(answer)
        return answer


@runner_fault(FaultClass.BATCH_MATE, "S-20")
class SplitsFollowTheNumberOfRows(ForwardingRunner):
    """The last bit of lse depends on the number of rows, including padded rows."""

    def attend(self, batch: Batch) -> Output:
        """Round differently if the batch has one row."""
        answer = self.inner.attend(batch)
        if batch.num_rows == 1:
            return Output(answer.out, np.nextafter(answer.lse, np.float32(0)))
        return answer


@runner_fault(FaultClass.BATCH_MATE, "S-20")
class PrefillTilesFollowTheBatch(ForwardingRunner):
    """The last bit of a prefill's output depends on whether the batch has other rows."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Round differently if the batch has one row."""
        answer = self.inner.prefill(batch)
        if batch.num_rows == 1:
            return rounded_otherwise(answer)
        return answer


@runner_fault(FaultClass.BATCH_MATE, "S-20")
class LayerTilesFollowTheBatch(ForwardingRunner):
    """The last bit of a layer's output depends on whether the step has other rows."""

    def layer(self, batch: LayerBatch) -> Output:
        """Round differently if the batch has one row."""
        answer = self.inner.layer(batch)
        if batch.step.num_rows == 1:
            return rounded_otherwise(answer)
        return answer


class _RoundsLaterSteps(ForwardingRunner):
    """The order of summation, and so the last bit, is that of the first step."""

    steps = 0

    def later(self, answer: Output) -> Output:
        """Round an output differently from the second step on."""
        self.steps += 1
        return rounded_otherwise(answer) if self.steps > 1 else answer


@runner_fault(FaultClass.STALE, "S-17", cites="flashinfer#4647 sglang#7184 sparkinfer#715")
class SplitsFollowTheFirstStep(_RoundsLaterSteps):
    """The order of summation in attention, and so the last bit, is that of the first step."""

    def attend(self, batch: Batch) -> Output:
        """Round differently from the second step on."""
        return self.later(self.inner.attend(batch))


@runner_fault(FaultClass.STALE, "S-17")
class LayerSplitsFollowTheFirstStep(_RoundsLaterSteps):
    """The order of summation in layers, and so the last bit, is that of the first step."""

    def layer(self, batch: LayerBatch) -> Output:
        """Round differently from the second step on."""
        return self.later(self.inner.layer(batch))


@runner_fault(FaultClass.STALE, "S-17")
class PrefillTilesFollowTheFirstStep(_RoundsLaterSteps):
    """The order of summation in prefills, and so the last bit, is that of the first step."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Round differently from the second step on."""
        return self.later(self.inner.prefill(batch))


@runner_fault(FaultClass.PARTIAL, "S-8", cites="FastDeploy#5921")
class MergeKeepsItsFirstPartial(ForwardingRunner):
    """If the first partial result is not empty, the merged out is the first one's."""

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge, and restore the first partial result where it is not empty."""
        answer = self.inner.merge(partials)
        seen = np.isfinite(partials[0].lse)
        answer.out[seen] = partials[0].out[seen]
        return answer
