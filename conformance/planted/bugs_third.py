"""A third thirty bugs of the torch backend, by other mechanisms, inside the envelope of `bugs`.

They were chosen as the first thirty were, without sight of any case; thresholds are drawn at
import, in the order of the classes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_mla_shared.problem import Batch, Mask, Output, Problem, Yarn
from planted.attention import finite
from planted.indexing import Row
from planted.memory import to_torch
from planted.rotation import magnitude
from planted.torch_backend import TorchRunner

_draws = random.Random(20261124)
draw, choice = _draws.randint, _draws.choice

# Plan


class MeanGrid(TorchRunner):
    """Plan covers a row by the tiles of `tile` tokens that a row of mean query length needs."""

    tile = choice((16, 32, 64))

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        mean = -(-int(batch.cu_seqlens_q[-1]) // max(1, batch.num_rows))
        covered = -(-mean // self.tile) * self.tile
        for row in self.rows(batch):
            lost = slice(min(row.tokens.start + covered, row.tokens.stop), row.tokens.stop)
            positions[lost], slots[lost] = 0, -1
        return positions, slots


class PaddedPositions(TorchRunner):
    """Tokens of a padded row have the positions that its lengths give, below 0."""

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        padded = to_torch(np.repeat(batch.seq_lens == 0, batch.query_lens))
        ends = to_torch(np.repeat(batch.cu_seqlens_q[1:], batch.query_lens)).long()
        below = torch.arange(len(ends)) - ends
        positions[: len(ends)] = below.where(padded, positions[: len(ends)])
        return positions, slots


class SlotsRunOn(TorchRunner):
    """The slots of a row of at most `limit` new tokens run on from the first one's."""

    limit = draw(4, 64)

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        for row in self.rows(batch):
            if 0 < row.query_len <= self.limit:
                run = slots[row.tokens.start] + torch.arange(row.query_len)
                slots[row.tokens] = run % (self.problem.num_blocks * self.problem.block_size)
        return positions, slots


# Append


class SlotView(TorchRunner):
    """Explicit slots are read as if they were contiguous."""

    def append_slots(self, batch: Batch) -> Tensor:
        slots = batch.slot_mapping
        if slots is None or slots.strides[0] <= 0:
            return super().append_slots(batch)
        dense = np.lib.stride_tricks.as_strided(slots, strides=(slots.itemsize,))
        return to_torch(dense).clamp(-1, self.problem.num_blocks * self.problem.block_size - 1)


class MeanStride(TorchRunner):
    """The stride of a token is taken to be a block's over the block size."""

    def addresses(self, slots: Tensor) -> Tensor:
        size = self.problem.block_size
        block_stride = self.problem.layout.block_stride // self.dtype.itemsize
        return slots // size * block_stride + slots % size * (block_stride // size)


class CompactedSlots(TorchRunner):
    """In steps of more than `limit` tokens, slots move up to the places of those skipped."""

    limit = draw(4, 48)

    def append_slots(self, batch: Batch) -> Tensor:
        slots = super().append_slots(batch)
        if len(slots) <= self.limit:
            return slots
        return torch.cat([slots[slots >= 0], slots[slots < 0]])


class ClearedBlocks(TorchRunner):
    """Appends of more than `limit` tokens clear what is left of the blocks that they begin."""

    limit = draw(8, 128)

    def append(self, batch: Batch) -> None:
        super().append(batch)
        slots, size = self.append_slots(batch), self.problem.block_size
        if len(slots) > self.limit:
            begun = slots[(slots >= 0) & (slots % size == 0)]
            rest = (begun[:, None] + torch.arange(size)).flatten()
            rest = rest[~torch.isin(rest, slots)]
            nothing = torch.zeros(len(rest), self.problem.dims.cached_dim, dtype=self.dtype)
            self.memory.write(self.addresses(rest), nothing)


class RepeatedAppend(TorchRunner):
    """A step that has the slots of the one before it is not appended."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.written = torch.zeros(0)

    def append_slots(self, batch: Batch) -> Tensor:
        before, self.written = self.written, super().append_slots(batch)
        return self.written.clone().fill_(-1) if torch.equal(self.written, before) else self.written


# Lengths, tiles, masks


class EqualParts(TorchRunner):
    """Rows of more than `limit` keys are cut into `parts` equal parts; the remainder is lost."""

    limit = draw(500, 4000)
    parts = choice((3, 5, 6, 7, 12))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.seq_len > self.limit:
            seen[:, row.seq_len // self.parts * self.parts :] = False
        return seen


class FirstQueryBound(TorchRunner):
    """A tile of `tile` queries reads keys to the end of the `key_tile` of its first one's last."""

    tile = choice((16, 32, 64, 128))
    key_tile = choice((32, 64))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if self.problem.mask is Mask.CAUSAL:
            first = torch.arange(row.query_len) // self.tile * self.tile
            bound = ((row.context_len + first) // self.key_tile + 1) * self.key_tile
            seen &= torch.arange(row.seq_len) < bound[:, None]
        return seen


class CausalBound(TorchRunner):
    """With the non-causal mask a tile of `tile` queries reads keys to that of its last query."""

    tile = choice((16, 32, 64, 128))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if self.problem.mask is Mask.NON_CAUSAL:
            end = (torch.arange(row.query_len) // self.tile + 1) * self.tile
            seen &= torch.arange(row.seq_len) < row.context_len + end[:, None]
        return seen


class CapacityParts(TorchRunner):
    """The longest row is cut into `parts` of whole tiles of 64 keys, rounded down."""

    parts = choice((8, 16, 32))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        part = max(64, self.problem.max_model_len // self.parts // 64 * 64)
        seen[:, self.parts * part :] = False
        return seen


class StraddlingDraft(TorchRunner):
    """Of a draft across two tiles of `tile` keys, the second is masked as a chain."""

    tile = choice((32, 64, 128))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        edge = (row.context_len // self.tile + 1) * self.tile
        if row.tree is not None and edge < row.seq_len:
            seen[:, edge:] = torch.ones_like(row.tree).tril()[:, edge - row.context_len :]
        return seen


class SwappedBytes(TorchRunner):
    """Packed lines of whole 32-bit words are read with the first byte highest."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        mask = batch.mask
        if mask is not None and mask.ndim == 2 and mask.shape[1] % 4 == 0:
            swapped = mask.reshape(len(mask), -1, 4)[:, :, ::-1]
            batch = replace(batch, mask=swapped.reshape(mask.shape))
        return super().trees(batch, spans)


# Rope


class IndexPositions(TorchRunner):
    """Queries of a tree of more than `limit` nodes rotate by their index, not their depth."""

    limit = draw(6, 40)

    def queries(self, batch: Batch, row: Row) -> Tensor:
        if row.query_len > self.limit:
            row = replace(row, tree=None)
        return super().queries(batch, row)


class RoundedPositions(TorchRunner):
    """Positions pass through bfloat16: past 256 they are rounded."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(x, positions.bfloat16().long())


class PlainKeys(TorchRunner):
    """Keys lack yarn's magnitude; queries have it."""

    def turn_keys(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        keys = super().turn_keys(k_pe, positions)
        size = 1.0 if self.problem.rope is None else magnitude(self.problem.rope.yarn)
        return keys if size == 1 else (keys.double() / size).to(self.dtype)


class ExactRamp(TorchRunner):
    """The ends of yarn's ramp are not rounded to whole pairs."""

    def ramp(self, theta: float, yarn: Yarn, dim: int) -> Tensor:
        low, high = (
            dim / 2 * math.log(yarn.original_max_position / (beta * 2 * math.pi), theta)
            for beta in (yarn.beta_fast, yarn.beta_slow)
        )
        low, high = max(low, 0), max(low, min(high, dim - 1))
        return ((torch.arange(dim // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)


# Softmax, splits, merges


class FiniteMask(TorchRunner):
    """Keys that a query does not see score -`floor`, not -inf."""

    floor = draw(100, 900)

    def highest(self, scores: Tensor) -> Tensor:
        return super().highest(scores.masked_fill_(scores.isneginf(), -self.floor))


class SkippedRescale(TorchRunner):
    """A split of 1024 keys that raises the lse by less than `limit` leaves the sums unscaled."""

    limit = draw(1, 6)

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        base, total, joined = lses[0], (lses[0] > -math.inf).double(), outs[0]
        for out, lse in zip(outs[1:], lses[1:], strict=True):
            higher = torch.maximum(base, lse)
            rise = higher - finite(base)
            scale = torch.exp(-rise).where((rise > self.limit) | base.isneginf(), 1.0)
            weight = torch.exp(lse - finite(higher))
            joined = joined * scale[..., None] + out * weight[..., None]
            base, total = higher, total * scale + weight
        return joined / total.where(total > 0, 1.0)[..., None], finite(base) + total.log()


class MergeHeads(TorchRunner):
    """A merge of more than `tile` heads weighs each by the lse of a head of the first tile."""

    tile = choice((16, 32, 64))

    def merge(self, partials: Sequence[Output]) -> Output:
        merged = super().merge(partials)
        head = np.arange(merged.lse.shape[1]) % self.tile
        wrong = super().merge([replace(p, lse=p.lse[:, head]) for p in partials])
        return Output(out=wrong.out, lse=merged.lse)


class InPlaceMerge(TorchRunner):
    """Two partials are merged in the arrays of the first."""

    def merge(self, partials: Sequence[Output]) -> Output:
        merged = super().merge(partials)
        if len(partials) == 2:
            partials[0].out[...], partials[0].lse[...] = merged.out, merged.lse
        return merged


# Rows, tables, results


class CommonPrefix(TorchRunner):
    """Blocks that the first row shares with the last are taken for shared by all."""

    def keys(self, batch: Batch, row: Row) -> Tensor:
        shortest = int(min(batch.seq_lens[0], batch.seq_lens[-1]))
        first, last = (to_torch(batch.block_table[end]).long() for end in (0, -1))
        alike = (first == last)[: shortest // self.problem.block_size]
        shared = first[: int(alike.cumprod(dim=0).sum())][: len(row.table)]
        return super().keys(
            batch, replace(row, table=torch.cat([shared, row.table[len(shared) :]]))
        )


class AlignedTable(TorchRunner):
    """Attention reads tables wider than `limit` from the multiple of 4 entries before the row."""

    limit = draw(4, 40)

    def keys(self, batch: Batch, row: Row) -> Tensor:
        table = to_torch(batch.block_table).long()
        if table.shape[1] > self.limit:
            start = row.index * table.shape[1] // 4 * 4
            read = table.flatten()[start : start + len(row.table)]
            row = replace(row, table=read % self.problem.num_blocks)
        return super().keys(batch, row)


class FoundRow(TorchRunner):
    """Attention takes the table of the row before if that has tokens but no queries."""

    def keys(self, batch: Batch, row: Row) -> Tensor:
        before = row.index - 1
        if before >= 0 and batch.seq_lens[before] and not batch.query_lens[before]:
            table = to_torch(batch.block_table[before, : len(row.table)]).long()
            row = replace(row, table=table % self.problem.num_blocks)
        return super().keys(batch, row)


class BalancedRows(TorchRunner):
    """Decode steps of more than `limit` rows sort them by length; answers are put back wrongly."""

    limit = draw(4, 48)

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        if batch.num_rows > self.limit and (batch.query_lens == 1).all():
            order = torch.from_numpy(np.argsort(-batch.seq_lens, kind="stable"))
            rows = order[order]  # instead of its inverse's
            out[: len(rows)], lse[: len(rows)] = out[rows], lse[rows]
        return super().output(batch, out, lse)


class PaddedLse(TorchRunner):
    """Steps of more than `limit` tokens write lse for heads padded to 16; it is read unpadded."""

    limit = draw(16, 200)

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        tokens, heads = lse.shape
        if tokens > self.limit:
            padded = torch.nn.functional.pad(lse, (0, -heads % 16), value=-math.inf)
            lse = padded.flatten()[: tokens * heads].view(tokens, heads).clone()
        return super().output(batch, out, lse)


class CapturedGrid(TorchRunner):
    """Every step runs the tiles of `tile` queries that the first one's longest row needed."""

    tile = choice((4, 8, 16, 32))

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.tiles = 0

    def attend(self, batch: Batch) -> Output:
        self.tiles = self.tiles or -(-int(batch.query_lens.max(initial=1)) // self.tile)
        return super().attend(batch)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        seen[self.tiles * self.tile :] = False
        return seen


# Gather


class GatherScan(TorchRunner):
    """A gather sums the lengths before a row in tiles of `tile` rows and carries one tile only."""

    tile = choice((16, 32, 64))

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        right = super().gather_context(batch)
        wrong = tuple(np.zeros_like(array) for array in right)
        ends = np.cumsum(batch.seq_lens)
        for row, (end, seq_len) in enumerate(zip(ends, batch.seq_lens, strict=True)):
            carried = int(batch.seq_lens[max(0, row // self.tile - 1) * self.tile : row].sum())
            for source, target in zip(right, wrong, strict=True):
                target[carried : carried + seq_len] = source[end - seq_len : end]
        return wrong[0], wrong[1]


class GatherOwnTokens(TorchRunner):
    """For a row of more than `limit` new tokens a gather repeats the last token before them."""

    limit = draw(2, 64)

    def context_slots(self, row: Row) -> Tensor:
        slots = super().context_slots(row)
        if row.query_len > self.limit and row.context_len:
            slots[row.context_len :] = slots[row.context_len - 1]
        return slots
