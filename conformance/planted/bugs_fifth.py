"""A fifth thirty bugs of the torch backend, by other mechanisms, inside the envelope of `bugs`.

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

from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Output, Problem
from planted.attention import finite
from planted.indexing import Row
from planted.memory import to_torch
from planted.rotation import magnitude
from planted.torch_backend import TorchRunner

_draws = random.Random(20261126)
draw, choice = _draws.randint, _draws.choice

# Plan and append


class PlanThreads(TorchRunner):
    """Plan and append derive nothing for rows past the first `limit`."""

    limit = choice((32, 64, 128, 256))

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        for row in self.rows(batch)[self.limit :]:
            positions[row.tokens], slots[row.tokens] = 0, -1
        return positions, slots


class BlockBefore(TorchRunner):
    """A single new token is put in the block of the token before it."""

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        size = self.problem.block_size
        for row in self.rows(batch):
            if row.query_len == 1 and row.context_len:
                block = row.table[(row.context_len - 1) // size]
                slots[row.tokens] = block * size + row.context_len % size
        return positions, slots


class CountedPositions(TorchRunner):
    """Keys' positions do not count the tokens of their row before them that have no slot."""

    def append(self, batch: Batch) -> None:
        self.skipped = torch.zeros(batch.num_tokens, dtype=torch.int64)
        without = (self.append_slots(batch) < 0).long()
        for row in self.rows(batch):
            self.skipped[row.tokens] = without[row.tokens].cumsum(dim=0)
        super().append(batch)

    def turn_keys(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        return super().turn_keys(k_pe, (positions - self.skipped).clamp(min=0))


class WholeBlocks(TorchRunner):
    """Rows of more than `limit` new tokens are put where the block that they begin in starts."""

    limit = draw(8, 256)

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        positions, slots = super().derive(batch)
        for row in self.rows(batch):
            if row.query_len > self.limit:
                first = row.context_len - row.context_len % self.problem.block_size
                slots[row.tokens] = self.slots(row.table, first + torch.arange(row.query_len))
        return positions, slots


class NullBlock(TorchRunner):
    """Tokens without a slot are written to slot 0."""

    def append_slots(self, batch: Batch) -> Tensor:
        return super().append_slots(batch).clamp(min=0)


# Lengths, tiles, masks


class Window(TorchRunner):
    """Queries see no key of more than `limit` tokens before the row's last."""

    limit = draw(4096, 30_000)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        seen[:, : max(0, row.seq_len - 1 - self.limit)] = False
        return seen


class MixedDecode(TorchRunner):
    """In a step with longer rows, rows of one query behind a context do not see their own key."""

    def attended_rows(self, batch: Batch) -> list[Row]:
        self.mixed = bool((batch.query_lens > 1).any())
        return super().attended_rows(batch)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if self.mixed and row.query_len == 1 and row.context_len:
            seen[:, -1] = False
        return seen


class DraftBound(TorchRunner):
    """Causal rows of at most `limit` queries see no key behind the first one's."""

    limit = draw(2, 8)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if self.problem.mask is Mask.CAUSAL and row.query_len <= self.limit:
            seen[:, row.context_len + 1 :] = False
        return seen


class LastTileMask(TorchRunner):
    """Only the last tile of `tile` keys is masked."""

    tile = choice((32, 64, 128))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        seen[:, : (row.seq_len - 1) // self.tile * self.tile] = True
        return seen


class RoundedTiles(TorchRunner):
    """Past the first, tiles of `tile` keys are counted to the nearest: less than half is lost."""

    tile = choice((32, 64, 128))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        tiles = (row.seq_len + self.tile // 2) // self.tile
        seen[:, max(1, tiles) * self.tile :] = False
        return seen


class SignedBytes(TorchRunner):
    """Words of 32 bits are put together from signed bytes: a high bit fills the bytes above it."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        if batch.mask is not None and self.problem.mask_spelling is MaskSpelling.PACKED:
            mask = batch.mask.copy()
            for byte in range(mask.shape[1]):
                if byte % 4:
                    mask[mask[:, byte - 1] >= 128, byte] = 255  # the sign
            batch = replace(batch, mask=mask)
        return super().trees(batch, spans)


class PackedLines(TorchRunner):
    """Packed lines of a row begin behind as many for each row before as the longest has."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        if batch.mask is None or self.problem.mask_spelling is not MaskSpelling.PACKED:
            return super().trees(batch, spans)
        mask, most = batch.mask.copy(), int(batch.query_lens.max(initial=0))
        for index, span in enumerate(spans):
            line = index * most + np.arange(span.stop - span.start)
            mask[span] = batch.mask[line % len(mask)]
        return super().trees(replace(batch, mask=mask), spans)


class UniformMatrices(TorchRunner):
    """QLEN spelling: a row's matrix begins behind one of the largest size for each row before."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        trees = super().trees(batch, spans)
        if batch.mask is None or self.problem.mask_spelling is not MaskSpelling.QLEN:
            return trees
        mask, most = to_torch(batch.mask), int(batch.query_lens.max(initial=0))
        for index, tree in enumerate(trees):
            if tree is not None and len(tree):
                place = index * most * most + torch.arange(tree.numel())
                trees[index] = mask[place % len(mask)].view(tree.shape)
        return trees


class ContextBlock(TorchRunner):
    """FULL spelling: draft columns begin at the block in which the context ends."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        trees = super().trees(batch, spans)
        if batch.mask is None or self.problem.mask_spelling is not MaskSpelling.FULL:
            return trees
        mask, offset = to_torch(batch.mask), 0
        for index, (tree, seq_len) in enumerate(zip(trees, batch.seq_lens.tolist(), strict=True)):
            if tree is None or not len(tree):
                continue
            lines = mask[offset : offset + len(tree) * seq_len].view(len(tree), seq_len)
            offset += lines.numel()
            context = seq_len - len(tree)
            first = context - context % self.problem.block_size
            trees[index] = lines[:, first : first + len(tree)]
        return trees


# Rope


class DynamicYarn(TorchRunner):
    """Positions below yarn's `original_max_position` rotate at the frequencies without it."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        turned, rope = super().rotate(x, positions), self.problem.rope
        if rope is None or rope.yarn is None:
            return turned
        near = positions < rope.yarn.original_max_position
        whole, size = self.problem, magnitude(rope.yarn)
        self.problem = replace(whole, rope=replace(rope, yarn=None))
        plain = super().rotate(x[near], positions[near])
        self.problem = whole
        turned[near] = (plain.double() * size).to(self.dtype)
        return turned


class PrefillPositions(TorchRunner):
    """Rows of more than `limit` queries rotate them from position 0, whatever the context."""

    limit = draw(16, 256)

    def queries(self, batch: Batch, row: Row) -> Tensor:
        if row.query_len > self.limit:
            row = replace(row, seq_len=row.query_len)
        return super().queries(batch, row)


class UnrotatedHeads(TorchRunner):
    """Heads past the first `limit` are not rotated."""

    limit = choice((8, 16, 32, 64))

    def queries(self, batch: Batch, row: Row) -> Tensor:
        queries = super().queries(batch, row)
        q_pe = to_torch(batch.q_pe[row.tokens])[:, self.limit :].double()
        queries[:, self.limit :, self.problem.dims.kv_lora_rank :] = q_pe
        return queries


class FalsyScale(TorchRunner):
    """A yarn `mscale_all_dim` of 0 counts as `mscale`."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        turned = super().rotate(x, positions)
        yarn = None if self.problem.rope is None else self.problem.rope.yarn
        if yarn is None or yarn.mscale_all_dim:
            return turned
        return (turned.double() / magnitude(yarn)).to(self.dtype)


# Heads, softmax, lse


class HeadPower(TorchRunner):
    """Heads past the largest power of two that they hold get no answer."""

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        power = 1 << (out.shape[1].bit_length() - 1)
        out[:, power:], lse[:, power:] = 0.0, -math.inf
        return super().output(batch, out, lse)


class HalfScores(TorchRunner):
    """Scores of rows of at most `limit` queries pass through float16."""

    limit = draw(1, 8)

    def attend_split(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        if len(queries) > self.limit:
            return super().attend_split(queries, keys, visible)
        scores = ((queries @ keys.T) * self.problem.softmax_scale).half().double()
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - finite(lse)[..., None])
        return weights @ keys[:, : self.problem.dims.kv_lora_rank], lse


class FirstTileMaximum(TorchRunner):
    """The maximum is that of the first `tile` keys: scores far above it overflow."""

    tile = choice((16, 32, 64, 128))

    def highest(self, scores: Tensor) -> Tensor:
        return super().highest(scores[..., : self.tile])


class LoneKey(TorchRunner):
    """The lse of rows of one key is 0."""

    def attend_row(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().attend_row(queries, keys, visible)
        return out, lse if len(keys) > 1 else torch.zeros_like(lse)


# Merge


class MergeCapacity(TorchRunner):
    """A merge holds `limit` partials; later ones are lost."""

    limit = choice((2, 4, 8, 16))

    def merge(self, partials: Sequence[Output]) -> Output:
        return super().merge(partials[: self.limit])


class WeighedEmpty(TorchRunner):
    """What an empty partial holds is multiplied by 0, NaN or not."""

    def merge(self, partials: Sequence[Output]) -> Output:
        merged = super().merge(partials)
        for partial in partials:
            empty = np.isneginf(partial.lse)
            with np.errstate(invalid="ignore"):  # infinity times 0
                merged.out[empty] += partial.out[empty] * np.float32(0)
        return merged


class MergeFloor(TorchRunner):
    """Partials of an lse below -`floor` are taken for empty."""

    floor = choice((100, 1000, 10_000))

    def merge(self, partials: Sequence[Output]) -> Output:
        empty = np.float32(-np.inf)
        return super().merge(
            [replace(p, lse=np.where(p.lse < -self.floor, empty, p.lse)) for p in partials]
        )


# Steps, tables, results


class KeptTable(TorchRunner):
    """A step whose rows have as many blocks as those of the step before keeps its table."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.tables: list[Tensor] = []

    def attended_rows(self, batch: Batch) -> list[Row]:
        rows = super().attended_rows(batch)
        if [len(table) for table in self.tables] == [len(row.table) for row in rows]:
            return [replace(r, table=t) for r, t in zip(rows, self.tables, strict=True)]
        self.tables = [row.table for row in rows]
        return rows


class LateLengths(TorchRunner):
    """A row that is one token longer than the same one of the step before keeps its length."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.lengths = np.zeros(0, dtype=np.int32)
        self.late: set[int] = set()

    def attended_rows(self, batch: Batch) -> list[Row]:
        pairs = zip(batch.seq_lens.tolist(), self.lengths.tolist(), strict=False)
        self.late = {i for i, (now, before) in enumerate(pairs) if before and now == before + 1}
        self.lengths = batch.seq_lens.copy()
        return super().attended_rows(batch)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.index in self.late:
            seen[:, -1] = False
        return seen


class PaddingLse(TorchRunner):
    """The lse of padded tokens at the end of a step of at most `limit` rows is 0."""

    limit = draw(2, 32)

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        if batch.num_rows <= self.limit:
            lse[int(batch.cu_seqlens_q[-1]) :] = 0.0
        return super().output(batch, out, lse)


class FusedQueries(TorchRunner):
    """Heads of `q_nope` are read as if they lay side by side, whatever lies between two tokens."""

    def queries(self, batch: Batch, row: Row) -> Tensor:
        q, (_, heads, rank) = batch.q_nope, batch.q_nope.shape
        dense = (heads * rank * q.itemsize, rank * q.itemsize, q.itemsize)
        if all(stride >= least for stride, least in zip(q.strides, dense, strict=True)):
            strides = (q.strides[0], *dense[1:])
            batch = replace(batch, q_nope=np.lib.stride_tricks.as_strided(q, strides=strides))
        return super().queries(batch, row)


# Gather


class GatherWidth(TorchRunner):
    """A gather reads the table as if it were as wide as the step's longest row needs."""

    def rows(self, batch: Batch) -> list[Row]:
        self.flat = to_torch(batch.block_table).long().flatten()
        self.width = self.blocks_of(int(batch.seq_lens.max(initial=0)))
        return super().rows(batch)

    def context_slots(self, row: Row) -> Tensor:
        place = row.index * self.width + torch.arange(len(row.table))
        table = self.flat[place] % self.problem.num_blocks
        return super().context_slots(replace(row, table=table))
