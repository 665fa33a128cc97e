"""A fourth thirty bugs of the torch backend, by other mechanisms, inside the envelope of `bugs`.

They were chosen as the first thirty were, without sight of any case; thresholds are drawn at
import, in the order of the classes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Output, Problem, Yarn
from planted.indexing import Row
from planted.memory import to_torch
from planted.rotation import magnitude
from planted.torch_backend import TorchRunner

_draws = random.Random(20261125)
draw, choice = _draws.randint, _draws.choice

# Plan and append


class ShortPositions(TorchRunner):
    """Plan and append keep positions in 16 bits."""

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        return positions % (1 << 16), slots


class SlotShort(TorchRunner):
    """Explicit slots are kept in 16 bits."""

    def append_slots(self, batch: Batch) -> Tensor:
        slots = super().append_slots(batch)
        if batch.slot_mapping is None:
            return slots
        return (slots % (1 << 16)).where(slots >= 0, slots)


class SkippedRow(TorchRunner):
    """A row whose first token has no slot is not appended at all."""

    def append_slots(self, batch: Batch) -> Tensor:
        slots = super().append_slots(batch)
        for row in self.attended_rows(batch):
            if slots[row.tokens.start] < 0:
                slots[row.tokens] = -1
        return slots


class LatentView(TorchRunner):
    """New latents are read as if they were contiguous."""

    def append(self, batch: Batch) -> None:
        ckv = batch.ckv
        dense = np.empty(ckv.shape, ckv.dtype).strides
        if all(stride >= least for stride, least in zip(ckv.strides, dense, strict=True)):
            batch = replace(batch, ckv=np.lib.stride_tricks.as_strided(ckv, strides=dense))
        super().append(batch)


class StaleSlots(TorchRunner):
    """After a step of more tokens, its slots past this step's get this step's last token too."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.held = torch.zeros(0, dtype=torch.int64)

    def append(self, batch: Batch) -> None:
        super().append(batch)
        slots = self.append_slots(batch)
        stale = self.held[len(slots) :]
        stale = stale[stale >= 0]
        if len(slots) and slots[-1] >= 0:
            last = self.gathered(slots[-1:])
            self.memory.write(self.addresses(stale), last.expand(len(stale), -1))
        self.held = slots.clone()


# Lengths, tiles, masks


class DoubleEdge(TorchRunner):
    """The key at each edge between two splits of `split` keys counts in both."""

    split = choice((512, 1024, 2048, 4096))

    def attend_row(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        edges = torch.arange(self.split, len(keys), self.split)
        index = torch.cat([torch.arange(len(keys)), edges])
        return super().attend_row(queries, keys[index], visible[:, index])


class StepWorkspace(TorchRunner):
    """Keys past the first `limit` of all rows' keys taken together are lost."""

    limit = draw(8000, 32_000)

    def attended_rows(self, batch: Batch) -> list[Row]:
        self.starts = np.cumsum(batch.seq_lens, dtype=np.int64) - batch.seq_lens
        return super().attended_rows(batch)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        seen[:, max(0, self.limit - int(self.starts[row.index])) :] = False
        return seen


class SkippedContext(TorchRunner):
    """Rows of several queries do not look at a context of fewer than `limit` keys."""

    limit = draw(8, 128)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.query_len > 1 and row.context_len < self.limit:
            seen[:, : row.context_len] = False
        return seen


class UnmaskedDraft(TorchRunner):
    """With the causal mask, rows of at most `limit` queries behind a context see every key."""

    limit = draw(2, 8)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if self.problem.mask is Mask.CAUSAL and row.context_len and row.query_len <= self.limit:
            seen[:] = True
        return seen


class PoisonTail(TorchRunner):
    """Rows of more than `limit` queries multiply what is behind them in their block by 0."""

    limit = draw(2, 64)

    def keys(self, batch: Batch, row: Row) -> Tensor:
        if row.query_len > self.limit:
            row = replace(row, seq_len=len(row.table) * self.problem.block_size)
        return super().keys(batch, row)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.query_len <= self.limit:
            return seen
        rest = len(row.table) * self.problem.block_size - row.seq_len
        return torch.nn.functional.pad(seen, (0, rest))


class ParentWalk(TorchRunner):
    """A node sees itself and its ancestors up to `limit` nodes in all."""

    limit = draw(6, 40)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.tree is not None:
            nearest = row.tree.long().flip(1).cumsum(dim=1).flip(1) <= self.limit
            seen[:, row.context_len :] &= nearest
        return seen


class MaskPrefix(TorchRunner):
    """FULL spelling: a row's lines begin behind its own query length times the keys before it."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        trees = super().trees(batch, spans)
        if batch.mask is None or self.problem.mask_spelling is not MaskSpelling.FULL:
            return trees
        mask, keys = to_torch(batch.mask), 0
        for index, (tree, seq_len) in enumerate(zip(trees, batch.seq_lens.tolist(), strict=True)):
            if tree is not None and len(tree):
                place = len(tree) * keys + torch.arange(len(tree) * seq_len)
                lines = mask[place % len(mask)].view(len(tree), seq_len)
                trees[index] = lines[:, seq_len - len(tree) :]
            keys += seq_len
        return trees


# Rope


class LongestQueries(TorchRunner):
    """Queries rotate as if every row had the step's longest query length."""

    def attended_rows(self, batch: Batch) -> list[Row]:
        self.longest = int(batch.query_lens.max(initial=0))
        return super().attended_rows(batch)

    def queries(self, batch: Batch, row: Row) -> Tensor:
        first = max(0, row.seq_len - self.longest)
        moved = replace(row, seq_len=first + row.query_len)
        return super().queries(batch, moved)


class YarnMagnitude(TorchRunner):
    """Yarn's magnitude is not divided by that of `mscale_all_dim`."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        turned = super().rotate(x, positions)
        yarn = None if self.problem.rope is None else self.problem.rope.yarn
        if yarn is None:
            return turned
        size = magnitude(replace(yarn, mscale_all_dim=0.0)) / magnitude(yarn)
        return turned if size == 1 else (turned.double() * size).to(self.dtype)


class DefaultBetas(TorchRunner):
    """Yarn's betas are 32 and 1, whatever they are."""

    def ramp(self, theta: float, yarn: Yarn, dim: int) -> Tensor:
        return super().ramp(theta, replace(yarn, beta_fast=32.0, beta_slow=1.0), dim)


# Heads, softmax, lse


class FoldedHeads(TorchRunner):
    """Single queries of more than `tile` heads take `q_pe` of a head of the first tile."""

    tile = choice((8, 16, 32, 64))

    def queries(self, batch: Batch, row: Row) -> Tensor:
        queries = super().queries(batch, row)
        if row.query_len == 1:
            rank = self.problem.dims.kv_lora_rank
            queries[:, :, rank:] = queries[:, torch.arange(queries.shape[1]) % self.tile, rank:]
        return queries


class DefaultScale(TorchRunner):
    """Rows of more than `limit` queries scale by ``(N + P) ** -0.5``, whatever the scale is."""

    limit = draw(2, 128)

    def queries(self, batch: Batch, row: Row) -> Tensor:
        queries, dims = super().queries(batch, row), self.problem.dims
        if row.query_len > self.limit:
            usual = (dims.qk_nope_head_dim + dims.qk_rope_head_dim) ** -0.5
            queries = queries * (usual / self.problem.softmax_scale)
        return queries


class MaximumBeforeMask(TorchRunner):
    """The maximum is taken before the mask: keys far below one that is not seen weigh nothing."""

    def attend_split(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().attend_split(queries, keys, visible)
        scores = (queries @ keys.T) * self.problem.softmax_scale
        under = lse < scores.amax(dim=-1) - 104  # what float32 makes 0 of
        return out.masked_fill(under[..., None], 0.0), lse.masked_fill(under, -math.inf)


class BfloatWeights(TorchRunner):
    """Tiles of more than `limit` queries x heads round the weights of values to bfloat16."""

    limit = draw(128, 4096)

    def attend_split(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().attend_split(queries, keys, visible)
        if queries.shape[0] * queries.shape[1] <= self.limit:
            return out, lse
        scores = (queries @ keys.T) * self.problem.softmax_scale
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        highest = self.highest(scores)
        weights = torch.exp(scores - highest).bfloat16().double()
        total = torch.exp(lse[..., None] - highest)
        values = keys[:, : self.problem.dims.kv_lora_rank]
        return weights @ values / total.where(total > 0, 1.0), lse


class LseOfTwo(TorchRunner):
    """The lse of rows of more than `limit` keys is to base 2."""

    limit = draw(1024, 16_000)

    def attend_row(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().attend_row(queries, keys, visible)
        return out, lse / math.log(2) if len(keys) > self.limit else lse


# Merge


class TokenEmpty(TorchRunner):
    """A partial is taken for empty at a token if it is empty there for the first head."""

    def merge(self, partials: Sequence[Output]) -> Output:
        return super().merge(
            [
                replace(p, lse=np.where(np.isneginf(p.lse[:, :1]), np.float32(-np.inf), p.lse))
                for p in partials
            ]
        )


class MergeGrid(TorchRunner):
    """A merge leaves tokens past the first `limit` as the first partial has them."""

    limit = draw(32, 512)

    def merge(self, partials: Sequence[Output]) -> Output:
        merged, first = super().merge(partials), partials[0]
        merged.out[self.limit :] = first.out[self.limit :]
        merged.lse[self.limit :] = first.lse[self.limit :]
        return merged


# Rows, tables, results


class DecodesFirst(TorchRunner):
    """As many first rows as rows have one query are taken for those: others answer one query."""

    def attended_rows(self, batch: Batch) -> list[Row]:
        self.decodes = int((batch.query_lens == 1).sum())
        return super().attended_rows(batch)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.index < self.decodes:
            seen[1:] = False
        return seen


class LostRows(TorchRunner):
    """Of more than `group` rows, those past the last full group of `group` get no answer."""

    group = choice((4, 8, 16, 32))

    def attended_rows(self, batch: Batch) -> list[Row]:
        rows = super().attended_rows(batch)
        end = batch.num_rows // self.group * self.group or batch.num_rows
        return [row for row in rows if row.index < end]


class CompactedRows(TorchRunner):
    """Attention does not count padded rows when it looks for a row's table."""

    def keys(self, batch: Batch, row: Row) -> Tensor:
        place = int((batch.seq_lens[: row.index] > 0).sum())
        table = to_torch(batch.block_table[place, : len(row.table)]).long()
        return super().keys(batch, replace(row, table=table % self.problem.num_blocks))


class CapturedStride(TorchRunner):
    """Attention reads every step's table by the width of the first one's."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.width = 0

    def keys(self, batch: Batch, row: Row) -> Tensor:
        table = to_torch(batch.block_table).long()
        self.width = self.width or table.shape[1]
        place = row.index * self.width + torch.arange(len(row.table))
        read = table.flatten()[place % table.numel()]
        return super().keys(batch, replace(row, table=read % self.problem.num_blocks))


class TileInBlock(TorchRunner):
    """Blocks larger than a tile of `tile` keys: the first key's block is taken for all its keys."""

    tile = choice((16, 32, 64))

    def keys(self, batch: Batch, row: Row) -> Tensor:
        if self.problem.block_size <= self.tile:
            return super().keys(batch, row)
        key = torch.arange(row.seq_len)
        slots = self.slots(row.table, key - key % self.tile) + key % self.tile
        return self.gathered(slots % (self.problem.num_blocks * self.problem.block_size)).double()


class TilePadding(TorchRunner):
    """Padding in the tile of `tile` tokens of the step's last token gets that token's answer."""

    tile = choice((8, 16, 32, 64))

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        end = int(batch.cu_seqlens_q[-1])
        if end:
            rest = slice(end, -(-end // self.tile) * self.tile)
            out[rest], lse[rest] = out[end - 1], lse[end - 1]
        return super().output(batch, out, lse)


# Gather


class GatherQueried(TorchRunner):
    """A gather repeats the first token of rows without queries."""

    def context_slots(self, row: Row) -> Tensor:
        slots = super().context_slots(row)
        return slots if row.query_len else slots[:1].expand(len(slots))


class GatherInt(TorchRunner):
    """A gather keeps the element at which a token starts in 31 bits."""

    def context_slots(self, row: Row) -> Tensor:
        slots = super().context_slots(row)
        return slots % ((1 << 31) // self.problem.dims.cached_dim)
