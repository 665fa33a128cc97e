"""Thirty bugs of the torch backend, each one step replaced, chosen before any case was looked at.

They lie inside a production envelope: rows to 33k keys, positions to 131072, 600 queries of a row
behind a context, appends of 600 tokens, 300 rows a step, tokens x heads to 16384 and more, draft
trees of 64 nodes, heads 1..128, block sizes 1..256, theta 1e4..1e6, softmax scales 1e-3..1e3 times
the usual, block ids to tens of thousands, 4 steps on a runner. Thresholds are drawn at import, in
the order of the classes; the range stands in the draw.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Output, Problem, Rope, Yarn
from planted.indexing import Row
from planted.torch_backend import TorchRunner

_draws = random.Random(20261122)
draw, choice = _draws.randint, _draws.choice

# Keys and queries


class LostKeys(TorchRunner):
    """Keys past the first `limit` of a row are lost."""

    limit = draw(4096, 32_000)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        seen[:, self.limit :] = False
        return seen


class LostTail(TorchRunner):
    """The last key of a row is lost if its length is `residue` modulo `tile`."""

    tile = choice((16, 32, 64, 128))
    residue = draw(1, tile - 1)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.seq_len % self.tile == self.residue:
            seen[:, -1] = False
        return seen


class TileEdge(TorchRunner):
    """The first query of every tile of `tile` but the first does not see its own key."""

    tile = choice((32, 64, 128, 256))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        first = torch.arange(self.tile, row.query_len, self.tile)
        if self.problem.mask is Mask.CAUSAL:
            seen[first, row.context_len + first] = False
        return seen


class DroppedQueries(TorchRunner):
    """Queries of a row past the first `limit` see nothing if the row has a context."""

    limit = draw(200, 580)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.context_len:
            seen[self.limit :] = False
        return seen


class DroppedTokens(TorchRunner):
    """Tokens of a step past the first `limit` are not appended."""

    limit = draw(200, 580)

    def append_slots(self, batch: Batch) -> Tensor:
        slots = super().append_slots(batch)
        slots[self.limit :] = -1
        return slots


class RowByte(TorchRunner):
    """Attention keeps a row's number in 8 bits: rows past 255 read the table of an earlier one."""

    def keys(self, batch: Batch, row: Row) -> Tensor:
        table = torch.from_numpy(batch.block_table[row.index % 256].astype(np.int64))
        return super().keys(batch, replace(row, table=table))


class UnwrittenHeads(TorchRunner):
    """Heads past the first `limit` of all tokens' heads taken together are not written."""

    limit = draw(8192, 16_000)

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        out.view(-1, out.shape[2])[self.limit :] = 0
        lse.view(-1)[self.limit :] = 0
        return super().output(batch, out, lse)


class HeadRemainder(TorchRunner):
    """Past the last full tile of `tile` heads, heads get the answer of those one tile before."""

    tile = choice((8, 16, 32))

    def queries(self, batch: Batch, row: Row) -> Tensor:
        queries = super().queries(batch, row)
        heads = queries.shape[1]
        if heads > self.tile and (rest := heads % self.tile):
            queries[:, heads - rest :] = queries[:, heads - rest - self.tile : heads - self.tile]
        return queries


# Draft trees


class MaskWord(TorchRunner):
    """Of a packed mask only the first `word` bits are looked at; later nodes repeat them."""

    word = choice((16, 32))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if self.problem.mask_spelling is MaskSpelling.PACKED and row.tree is not None:
            node = torch.arange(row.query_len) % self.word
            seen[:, row.context_len :] = row.tree[:, node]
        return seen


class DepthCap(TorchRunner):
    """Tree nodes deeper than `limit` have the position of depth `limit`."""

    limit = draw(12, 56)

    def positions(self, row: Row) -> Tensor:
        positions = super().positions(row)
        if row.tree is not None:
            positions = positions.clamp(max=row.context_len + self.limit)
        return positions


# Rope


class RopeTable(TorchRunner):
    """Positions past `limit` rotate as `limit` does: the table of cosines ends there."""

    limit = draw(33_000, 120_000)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(x, positions.clamp(max=self.limit))


class ThetaCap(TorchRunner):
    """A rope base above `limit` counts as `limit`."""

    limit = draw(20_000, 500_000)

    def frequencies(self, rope: Rope, dim: int) -> Tensor:
        return super().frequencies(replace(rope, theta=min(rope.theta, self.limit)), dim)


class YarnBase(TorchRunner):
    """Yarn's ramp takes the rope base for 10000, whatever it is."""

    def ramp(self, theta: float, yarn: Yarn, dim: int) -> Tensor:  # noqa: ARG002 - the bug
        return super().ramp(10_000.0, yarn, dim)


class ConsecutivePositions(TorchRunner):
    """Appends of more than `tile` tokens rotate keys as if positions rose by 1 in each tile."""

    tile = choice((64, 128, 256))

    def turn_keys(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        if len(k_pe) > self.tile:
            token = torch.arange(len(k_pe))
            positions = positions[token // self.tile * self.tile] + token % self.tile
        return super().turn_keys(k_pe, positions)


# Softmax, splits, merges


class FiniteMaximum(TorchRunner):
    """The running maximum starts at -`floor`, not at -inf: far lower scores weigh nothing."""

    floor = draw(50, 400)

    def highest(self, scores: Tensor) -> Tensor:
        highest = super().highest(scores)
        underflow = highest < -self.floor - 104  # what float32 makes 0 of
        return highest.masked_fill(underflow, 1e6)


class LseOfFirstSplits(TorchRunner):
    """The lse of a row of more than `limit` splits of 1024 keys is that of the first `limit`."""

    limit = draw(2, 12)

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = super().join_splits(outs, lses)
        _, lse = super().join_splits(outs[: self.limit], lses[: self.limit])
        return out, lse


class EmptySplit(TorchRunner):
    """A split of `split_size` keys in which a query sees nothing weighs as one key of score 0."""

    split_size = choice((256, 512, 1024, 2048))

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return super().join_splits(outs, lses.masked_fill(lses.isneginf(), 0.0))


class HalfValues(TorchRunner):
    """Cached tokens of rows of more than `limit` keys pass through float16."""

    limit = draw(1500, 20_000)

    def keys(self, batch: Batch, row: Row) -> Tensor:
        keys = super().keys(batch, row)
        return keys.half().double() if row.seq_len > self.limit else keys


class MergeOverflow(TorchRunner):
    """Partials are weighed against the first one that is not empty, not the largest."""

    def merge_base(self, lses: Tensor) -> Tensor:
        base = lses[0]
        for lse in lses[1:]:
            base = torch.where(base.isneginf(), lse, base)
        return base


# State between steps


class StaleTable(TorchRunner):
    """From the third step on, rows with fewer blocks than in the last one keep its table."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.steps = 0
        self.before: dict[int, Tensor] = {}
        self.now: dict[int, Tensor] = {}

    def attend(self, batch: Batch) -> Output:
        self.steps += 1
        self.before, self.now = self.now, {}
        return super().attend(batch)

    def keys(self, batch: Batch, row: Row) -> Tensor:
        kept = self.before.get(row.index, row.table)
        if self.steps >= 3 and len(row.table) < len(kept):
            row = replace(row, table=kept)
        self.now[row.index] = row.table
        return super().keys(batch, row)


class StalePadding(TorchRunner):
    """From the third step on, padded tokens at the end keep the answers of the step before."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.steps = 0
        self.kept: tuple[Tensor, Tensor] | None = None

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        self.steps += 1
        if self.steps >= 3 and self.kept is not None:
            padded = slice(int(batch.cu_seqlens_q[-1]), min(len(out), len(self.kept[0])))
            out[padded], lse[padded] = self.kept[0][padded], self.kept[1][padded]
        self.kept = out.clone(), lse.clone()
        return super().output(batch, out, lse)


class AliasedResult(TorchRunner):
    """Answers of as many tokens share memory: a later one overwrites an earlier one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        kept_out, kept_lse = self.buffers.setdefault(len(out), (out, lse))
        return super().output(batch, kept_out.copy_(out), kept_lse.copy_(lse))


# Tables, blocks, slots


class GatherByte(TorchRunner):
    """A gather keeps a token's place in its block in 8 bits, signed: blocks of more than 128."""

    def context_slots(self, row: Row) -> Tensor:
        slots = super().context_slots(row)
        return slots - 256 * (torch.arange(row.seq_len) % self.problem.block_size >= 128)


class TableCut(TorchRunner):
    """Attention holds `limit` table entries of a row; the last one stands for all later ones."""

    limit = draw(256, 2000)

    def keys(self, batch: Batch, row: Row) -> Tensor:
        held = torch.arange(len(row.table)).clamp(max=self.limit - 1)
        return super().keys(batch, replace(row, table=row.table[held]))


class BlockBits(TorchRunner):
    """Attention keeps the low `bits` bits of a block id."""

    bits = choice((14, 15))

    def keys(self, batch: Batch, row: Row) -> Tensor:
        return super().keys(batch, replace(row, table=row.table % (1 << self.bits)))


class SlotRun(TorchRunner):
    """Explicit slots whose ends fit a run are taken for one, whatever their order between."""

    def append_slots(self, batch: Batch) -> Tensor:
        slots = super().append_slots(batch)
        if batch.slot_mapping is not None and len(slots):
            run = slots[0] + torch.arange(len(slots))
            if slots[0] >= 0 and run[-1] == slots[-1]:
                return run
        return slots


class GatherWorkspace(TorchRunner):
    """A gather returns zeros past its first `limit` tokens."""

    limit = draw(5000, 32_000)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        ckv, k_pe = super().gather_context(batch)
        ckv[self.limit :], k_pe[self.limit :] = 0, 0
        return ckv, k_pe


# Padding, order of rows, strides


class UnwrittenPadding(TorchRunner):
    """Of the padded tokens at the end of a step, those past `limit` are left unwritten (NaN)."""

    limit = draw(32, 400)

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        out[int(batch.cu_seqlens_q[-1]) + self.limit :] = torch.nan
        lse[int(batch.cu_seqlens_q[-1]) + self.limit :] = torch.nan
        return super().output(batch, out, lse)


class PaddingEndsStep(TorchRunner):
    """Rows behind a padded row that is row `first` or a later one are taken for padding."""

    first = draw(4, 40)

    def attended_rows(self, batch: Batch) -> list[Row]:
        padded = [i for i in np.flatnonzero(batch.seq_lens == 0).tolist() if i >= self.first]
        end = min(padded, default=batch.num_rows)
        return [row for row in super().attended_rows(batch) if row.index < end]


class AssumedStrides(TorchRunner):
    """Without a rope `q_pe` is read as if it were contiguous."""

    def queries(self, batch: Batch, row: Row) -> Tensor:
        q_pe = batch.q_pe
        if self.problem.rope is None and all(stride > 0 for stride in q_pe.strides):
            dense = np.empty(q_pe.shape, q_pe.dtype).strides
            batch = replace(batch, q_pe=np.lib.stride_tricks.as_strided(q_pe, strides=dense))
        return super().queries(batch, row)
