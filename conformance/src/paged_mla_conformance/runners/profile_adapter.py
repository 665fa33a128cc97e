"""A backend that uses the conventions of a profile; the suite uses those of the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.runners.profile import Profile
from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.layer import absorbed_step
from paged_mla_reference.rules.paging import NO_SLOT, used_blocks
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.backend import OPERATIONS, Backend, Capabilities, Runner
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.inputs import INT32_MAX
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.operation import Operation
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem, Rows

LN2 = float(np.log(2.0))
STALE = (1.0, -2.0)  # values in stale memory, in place of NaN and of huge numbers


@dataclass(frozen=True)
class AdaptedBackend:
    """A backend whose runners translate between the rules and a profile.

    See :class:`paged_mla_shared.backend.Backend`.
    """

    inner: Backend
    profile: Profile

    @property
    def name(self) -> str:
        """The name of the inner backend."""
        return self.inner.name

    @property
    def version(self) -> str:
        """The version of the inner backend."""
        return self.inner.version

    @property
    def mode(self) -> str:
        """The mode of the inner backend."""
        return self.inner.mode

    @property
    def device(self) -> str:
        """The device of the inner backend."""
        return self.inner.device

    @property
    def memory_bytes(self) -> int:
        """The free memory of the inner backend."""
        return self.inner.memory_bytes

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner backend."""
        return self.inner.capabilities

    @property
    def has_surroundings(self) -> bool:
        """The attribute of the inner backend; ``False`` if it has none."""
        return bool(getattr(self.inner, "has_surroundings", False))

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner that translates between the rules and the profile."""
        return AdaptedRunner(self.inner, problem, self.profile)


def adapted(backend: Backend, profile: Profile) -> Backend:
    """Return a backend that translates to `profile`, or `backend` if nothing is to translate."""
    return backend if profile.as_written else AdaptedBackend(backend, profile)


class AdaptedRunner(Runner):
    """A runner that translates between the rules and a profile.

    See :class:`paged_mla_shared.backend.Runner`. Block b of the rules is block b + ``_blocks`` of
    the inner runner; ``_slots`` is the same offset in tokens. For operations without a method here,
    only the batch is translated, because their results do not depend on the profile.
    """

    def __init__(self, backend: Backend, problem: Problem, profile: Profile) -> None:
        self._problem = problem
        self._profile = profile
        self._blocks = int(profile.reserved_block)
        self._slots = self._blocks * problem.block_size
        longest = problem.max_query_tokens * profile.padded_seq_len
        self._inner_problem = replace(
            problem,
            num_blocks=problem.num_blocks + self._blocks,
            max_model_len=max(problem.max_model_len, longest),
        )
        self._inner = backend.prepare(self._inner_problem)

    def load_cache(self, image: CacheImage) -> None:
        """Load an image after the reserved block.

        In a profile with ``unread = "stale"``, NaN and huge numbers are replaced by plain numbers.
        """
        layout = self._inner_problem.layout
        zeros = np.zeros((self._blocks, layout.block_bytes), np.uint8)
        reserved = np.arange(self._blocks)
        self._asked, self._shown = image, image
        if self._profile.unread == "stale":
            blocks, dtype = _stale_blocks(image), image.layout.format.ckv_dtype
            self._shown = replace(image, blocks=blocks, poison=_stale(image.poison, dtype))
        inner = CacheImage(
            layout=layout,
            block_ids=np.concatenate([reserved, image.block_ids + self._blocks]),
            blocks=np.concatenate([zeros, self._shown.blocks]),
            poison=self._shown.poison,
        )
        self._inner.load_cache(inner)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read blocks; bytes that still have their stale values get their original values.

        The bytes of a key, or of its scales, get them only if all of them are stale.
        """
        blocks = self._inner.read_cache(block_ids + self._blocks)
        if self._profile.unread != "stale":
            return blocks
        blocks = blocks.copy()
        shown, asked = self._shown.read(block_ids), self._asked.read(block_ids)
        layout = self._problem.layout
        kept = (blocks == shown).view(np.uint8)
        for whole in (layout.rows(kept), layout.scale_bytes(kept)):
            whole[...] = whole.all(axis=-1, keepdims=True)
        return np.where(kept, asked, blocks)

    def plan(self, batch: Batch) -> Metadata:
        """Plan, and translate the slots, and the positions of padding, to those of the rules."""
        found = self._inner.plan(self._pad(batch))
        if not self._blocks:
            return found
        slots = np.maximum(found.slot_mapping - self._slots, NO_SLOT)
        return Metadata(np.where(_padding(batch), 0, found.positions), slots)

    def attend(self, batch: Batch) -> Output:
        """Attend, and translate the output to the conventions of the rules."""
        answer = self._inner.attend(self._pad(batch))
        right = self._oracle(batch) if self._profile.lse == "none" else None
        return self._as_ruled(answer, batch, right)

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge partial results in the conventions of the profile."""
        layout = self._profile.merge_lse_layout
        theirs = [Output(p.out, self._theirs(p.lse, layout)) for p in partials]
        merged = self._inner.merge(theirs)
        return Output(merged.out, self._ours(merged.lse, layout))

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to keys and values, and translate the output to the conventions of the rules."""
        profile = self._profile
        answer = self._inner.prefill(_stale_keys(batch) if profile.unread == "stale" else batch)
        right = None
        if profile.lse == "none":
            right = prefill(self._problem, batch, Rounding.EXACT).lse.astype(np.float32)
        return self._as_ruled(answer, batch, right)

    def layer(self, batch: LayerBatch) -> Output:
        """Run a layer, and translate the output to the conventions of the rules."""
        answer = self._inner.layer(replace(batch, step=self._pad(batch.step)))
        right = None
        if self._profile.lse == "none":
            right = self._oracle(absorbed_step(self._problem, batch))
        return self._as_ruled(answer, batch.step, right)

    def translated(self, operation: Operation, batch: Batch, *others: Any) -> Any:
        """Call an operation on a step that is translated to the conventions of the profile."""
        shown = self._relabel(batch) if operation.reads_rows else self._pad(batch)
        return getattr(self._inner, operation.name)(shown, *others)

    def _as_ruled(self, answer: Output, batch: Rows, right: NDArray[np.float32] | None) -> Output:
        """Return an output in the conventions of the rules; `right` replaces its lse if given."""
        out = answer.out
        lse = self._ours(answer.lse, self._profile.lse_layout) if right is None else right
        if self._profile.empty_rows == "ignored":
            padding = _padding(batch)
            out, lse = _with(out, padding, 0.0), _with(lse, padding, -np.inf)
        return Output(out, lse)

    def _relabel(self, batch: Batch) -> Batch:
        """Return the batch with block ids after the reserved block, and with filled table tails."""
        if not self._blocks and self._profile.table_fill == "poison":
            return batch
        table, problem = _copy(batch.block_table), self._problem
        known = (table >= 0) & (table < problem.num_blocks)
        table[known] += self._blocks
        if isinstance(self._profile.table_fill, int):
            needed = -(-batch.seq_lens // problem.block_size)
            past = np.arange(table.shape[1]) >= needed[:, None]
            table[past & ~known] = self._profile.table_fill
        slots = batch.slot_mapping
        if slots is not None:
            slots = np.where(slots >= 0, slots + self._slots, slots)
        return replace(batch, block_table=table, slot_mapping=slots)

    def _pad(self, batch: Batch) -> Batch:
        """Return the batch with the padding of the profile."""
        profile, shown = self._profile, self._relabel(batch)
        padding = _padding(batch)
        if profile.unread == "stale" and padding.any():
            names = ("q_nope", "q_pe", "ckv", "k_pe")
            arrays = {name: _copy(getattr(shown, name)) for name in names}
            for array in arrays.values():
                array[padding] = STALE[0]
            shown = replace(shown, **arrays)
        if profile.padded_slot != NO_SLOT:
            slots = shown.slot_mapping
            if slots is None:
                slots = metadata(self._inner_problem, shown).slot_mapping
            shown = replace(shown, slot_mapping=np.where(slots < 0, profile.padded_slot, slots))
        if profile.padded_seq_len and self._problem.mask is not Mask.TREE:
            shown = self._lengthen(shown)
        return shown

    def _lengthen(self, batch: Batch) -> Batch:
        """Return the batch in which rows without a request have the padded length, in block 0."""
        padded = batch.seq_lens == 0
        shortest = np.maximum(batch.query_lens, self._profile.padded_seq_len)
        seq_lens = np.where(padded, shortest, batch.seq_lens).astype(np.int32)
        width = int(-(-seq_lens.max(initial=0) // self._problem.block_size))
        table = batch.block_table
        if table.shape[1] < width:
            table = np.pad(table, ((0, 0), (0, width - table.shape[1])))
        table = _copy(table)
        table[padded] = 0
        return replace(batch, seq_lens=seq_lens, block_table=table)

    def _ours(self, lse: NDArray[np.float32], layout: str) -> NDArray[np.float32]:
        """Return an lse of the inner runner in the conventions of the rules."""
        lse = lse if layout == "[T, H]" else np.ascontiguousarray(lse.T)
        if self._profile.lse == "base 2":
            lse = (lse.astype(np.float64) * LN2).astype(lse.dtype)
        return self._swap(lse)

    def _theirs(self, lse: NDArray[np.float32], layout: str) -> NDArray[np.float32]:
        """Return an lse in the conventions of the profile."""
        lse = self._swap(lse)
        if self._profile.lse == "base 2":
            lse = (lse.astype(np.float64) / LN2).astype(lse.dtype)
        return lse if layout == "[T, H]" else np.ascontiguousarray(lse.T)

    def _swap(self, lse: NDArray[np.float32]) -> NDArray[np.float32]:
        """Negate the infinities of an lse if the profile uses +inf for queries without keys."""
        return np.where(np.isinf(lse), -lse, lse) if self._profile.empty_lse > 0 else lse

    def _oracle(self, batch: Batch) -> NDArray[np.float32]:
        """Return the right lse, for backends that return none."""
        size = self._problem.block_size
        used = [used_blocks(batch, row, size) for row in range(batch.num_rows)]
        ids = np.unique(np.concatenate([np.zeros(1, np.int64), *used]))
        image = replace(self._asked, block_ids=ids, blocks=self.read_cache(ids))
        exact = attend(self._problem, batch, image, Rounding.EXACT)
        return exact.lse.astype(np.float32)


def _stale_blocks(image: CacheImage) -> NDArray[np.uint8]:
    """Return the blocks of an image with plain numbers in place of NaN and huge numbers."""
    layout, blocks = image.layout, image.blocks
    stale = _stale(blocks, layout.format.ckv_dtype)
    layout.rows(stale)[...], layout.scales(stale)[...] = layout.rows(blocks), layout.scales(blocks)
    parts = [layout.field(stale, field.name) for field in layout.format.fields(layout.dims)]
    for part in (*parts, layout.scales(stale)):
        _make_plain(part)
    return stale


def _stale(storage: NDArray[np.uint8], dtype: str) -> NDArray[np.uint8]:
    """Return bytes of elements of one type with plain numbers in place of NaN and huge numbers."""
    values = storage.view(numpy_dtype(dtype)).copy()
    _make_plain(values)
    return values.view(np.uint8)


def _make_plain(values: NDArray[Any]) -> None:
    numbers = values.astype(np.float32)
    values[np.isnan(numbers)] = STALE[0]
    values[np.abs(numbers) > 1e4] = STALE[1]


def _stale_keys(batch: PrefillBatch) -> PrefillBatch:
    """Return a prefill with plain numbers in the queries and keys that a backend must not read."""
    live = int(batch.cu_seqlens_k[-1])
    unread = np.ones(len(batch.k_pe), bool)
    unread[:live] = np.repeat(batch.query_lens == 0, batch.seq_lens)
    padding = np.arange(batch.num_tokens) >= batch.cu_seqlens_q[-1]
    arrays: dict[str, Any] = {}
    for name in ("q_nope", "q_pe", "k_nope", "k_pe", "v"):
        arrays[name] = _copy(getattr(batch, name))
        arrays[name][padding if name.startswith("q") else unread] = STALE[0]
    return replace(batch, **arrays)


def _padding(batch: Rows) -> NDArray[np.bool_]:
    """Return a mask of the tokens that belong to no request, bool [T]."""
    padding = np.ones(batch.num_tokens, bool)
    padding[: int(batch.cu_seqlens_q[-1])] = np.repeat(batch.seq_lens == 0, batch.query_lens)
    return padding


def _with(answer: NDArray[Any], padding: NDArray[np.bool_], value: float) -> NDArray[Any]:
    """Return an output with `value` for padding; one with a wrong length is returned unchanged."""
    if len(answer) != len(padding):
        return answer
    answer = answer.copy()
    answer[padding] = value
    return answer


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy with the same strides; gaps between elements contain NaN or 2^31 - 1."""
    span = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    fill = INT32_MAX if array.dtype.kind == "i" else np.nan
    flat = np.full(max(span // array.itemsize, 0) + 1, fill, array.dtype)
    copy = np.lib.stride_tricks.as_strided(flat, array.shape, array.strides)
    copy[...] = array
    return copy


def _translated(operation: Operation) -> Callable[..., Any]:
    return lambda runner, *given: runner.translated(operation, *given)


for _name, _operation in OPERATIONS.items():
    if _name not in vars(AdaptedRunner):
        setattr(AdaptedRunner, _name, _translated(_operation))
