"""Thirty more bugs of the torch backend, by other mechanisms, inside the envelope of `bugs`.

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

from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Output, Problem, RopePairing, Yarn
from planted.indexing import Row
from planted.memory import to_torch
from planted.torch_backend import TorchRunner

_draws = random.Random(20261123)
draw, choice = _draws.randint, _draws.choice

# Queries, heads, results


class StraddlingTile(TorchRunner):
    """Queries of a flat tile of `tile` query-head pairs are counted from its first pair's."""

    tile = choice((16, 32, 64))

    def attend_row(self, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        heads = queries.shape[1]
        if not (heads % self.tile and self.tile % heads):
            return super().attend_row(queries, keys, visible)
        pair = torch.arange(len(queries) * heads)
        inside = pair % self.tile
        query = (pair - inside) // heads + inside // heads  # instead of pair // heads
        out, lse = super().attend_row(queries.flatten(0, 1)[:, None], keys, visible[query])
        return out.view(len(queries), heads, -1), lse.view(-1, heads)


class SharedMaximum(TorchRunner):
    """Groups of `heads` heads share a maximum: a head whose scores are far lower gets nothing."""

    heads = choice((8, 16, 32, 64))

    def highest(self, scores: Tensor) -> Tensor:
        highest = super().highest(scores)
        groups = torch.split(highest, self.heads, dim=1)
        shared = torch.cat([g.amax(dim=1, keepdim=True).expand_as(g) for g in groups], dim=1)
        underflow = highest < shared - 104  # what float32 makes 0 of
        return highest.masked_fill(underflow, 1e6)


class WideLse(TorchRunner):
    """Steps of more than `limit` tokens return lse in float64."""

    limit = draw(40, 500)

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        return super().output(batch, out, lse.double() if len(lse) > self.limit else lse)


class OverlappedTile(TorchRunner):
    """A row's last tile of `tile` queries is moved back to be full; the overlap rotates twice."""

    tile = choice((16, 32, 64, 128))

    def queries(self, batch: Batch, row: Row) -> Tensor:
        queries = super().queries(batch, row)
        full = row.query_len // self.tile * self.tile
        if 0 < full < row.query_len:
            overlap = slice(row.query_len - self.tile, full)
            q_pe = queries[overlap, :, self.problem.dims.kv_lora_rank :]
            q_pe[:] = self.rotate(q_pe.to(self.dtype), self.positions(row)[overlap])
        return queries


class ChunkedContext(TorchRunner):
    """Rows of several queries read a context above `chunk` in chunks, each in whole blocks."""

    chunk = draw(1500, 6000)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.query_len > 1 and row.context_len > self.chunk:
            whole = self.chunk // self.problem.block_size * self.problem.block_size
            lost = torch.arange(row.context_len) % self.chunk >= whole
            seen[:, : row.context_len][:, lost] = False
        return seen


# Draft trees


class PaddedMatrix(TorchRunner):
    """In the QLEN spelling a padded row's matrix is not counted: later rows begin too early."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        if self.problem.mask_spelling is MaskSpelling.QLEN:
            lens = batch.seq_lens.tolist()
            spans = [s if seq_len else slice(0, 0) for s, seq_len in zip(spans, lens, strict=True)]
        return super().trees(batch, spans)


class MaskOffset(TorchRunner):
    """In the FULL spelling the place where a row's lines begin is kept in `bits` bits."""

    bits = draw(16, 20)

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        trees = super().trees(batch, spans)
        if batch.mask is None or self.problem.mask_spelling is not MaskSpelling.FULL:
            return trees
        mask, start = to_torch(batch.mask), 0
        for row, (nodes, width) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            size = int(nodes) * int(width)
            if size:
                lines = mask[start % (1 << self.bits) :][:size].view(nodes, width)
                trees[row] = lines[:, width - nodes :]
            start += size
        return trees


class FirstRowChain(TorchRunner):
    """If the first row's tree is a chain, every row's is taken for one."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        trees = super().trees(batch, spans)
        chains = [None if tree is None else torch.ones_like(tree).tril() for tree in trees]
        for tree, chain in zip(trees[:1], chains, strict=False):
            if tree is not None and chain is not None and torch.equal(tree, chain):
                return chains
        return trees


class ContextTile(TorchRunner):
    """The first `tile` keys of a tree row are taken for context without a look at the mask."""

    tile = choice((16, 32, 64))

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        if row.tree is not None:
            seen[:, : self.tile] = True
        return seen


class PackedWidth(TorchRunner):
    """Packed lines are taken to be no wider than the longest draft needs."""

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        mask = batch.mask
        if mask is not None and self.problem.mask_spelling is MaskSpelling.PACKED:
            shape = len(mask), -(-self.problem.max_draft_tokens // 8)
            batch = replace(batch, mask=mask.reshape(-1)[: math.prod(shape)].reshape(shape))
        return super().trees(batch, spans)


# Rope


class FusedRope(TorchRunner):
    """Appends of at most `limit` tokens rotate keys by halves, whatever the pairing."""

    limit = draw(1, 6)

    def turn_keys(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        rope = self.problem.rope
        if rope is None or rope.pairing is RopePairing.NEOX or len(k_pe) > self.limit:
            return super().turn_keys(k_pe, positions)
        pairs = torch.stack(k_pe.chunk(2, dim=1), dim=2).flatten(1)
        return torch.cat(super().turn_keys(pairs, positions).view(len(k_pe), -1, 2).unbind(2), 1)


class YarnCeiling(TorchRunner):
    """Yarn's ramp is cut at the number of pairs, not at that of elements."""

    def ramp(self, theta: float, yarn: Yarn, dim: int) -> Tensor:
        last = dim / 2 - 1.5  # rounded up: the last pair
        turns = yarn.original_max_position / (2 * math.pi) / theta ** (2 * last / dim)
        return super().ramp(theta, replace(yarn, beta_slow=max(yarn.beta_slow, turns)), dim)


# Softmax, splits, merges


class ScoreClamp(TorchRunner):
    """Scores above `limit` count as `limit`."""

    limit = draw(80, 900)

    def highest(self, scores: Tensor) -> Tensor:
        return super().highest(scores.clamp_(max=self.limit))


class HalfPartials(TorchRunner):
    """Splits of more than `limit` queries x heads pass on what they computed in float16."""

    limit = draw(256, 2048)

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        if len(outs) > 1 and lses[0].numel() > self.limit:
            outs = outs.half().double()
        return super().join_splits(outs, lses)


class SkippedSplit(TorchRunner):
    """A split of 1024 keys whose lse is more than `limit` below the highest is left out."""

    limit = draw(3, 6)

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        light = lses < lses.amax(dim=0) - self.limit
        return super().join_splits(outs, lses.masked_fill(light, -math.inf))


class LoneSplit(TorchRunner):
    """Splits of 1024 keys are joined by groups of `group`; a last group of one is lost."""

    group = choice((2, 3, 4, 8))

    def join_splits(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        if len(outs) > 1 and len(outs) % self.group == 1:
            outs, lses = outs[:-1], lses[:-1]
        return super().join_splits(outs, lses)


class EqualPartials(TorchRunner):
    """Of partials that share the highest lse only the first counts."""

    def merge_base(self, lses: Tensor) -> Tensor:
        base = super().merge_base(lses)
        highest = lses == base
        lses.masked_fill_(highest & (highest.cumsum(dim=0) > 1), -math.inf)
        return base


class LonePartial(TorchRunner):
    """A single partial is returned as it is, empty or not."""

    def merge(self, partials: Sequence[Output]) -> Output:
        merged = super().merge(partials)
        if len(partials) > 1:
            return merged
        return Output(out=partials[0].out.copy(), lse=partials[0].lse.copy())


# State between steps


class KeptPlan(TorchRunner):
    """Positions and slots are those of the first step that had the same lengths."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.plans: dict[tuple[int, bytes, bytes], tuple[Tensor, Tensor]] = {}

    def derive(self, batch: Batch) -> tuple[Tensor, Tensor]:
        lengths = batch.num_tokens, batch.cu_seqlens_q.tobytes(), batch.seq_lens.tobytes()
        return self.plans.setdefault(lengths, super().derive(batch))


class KeptMask(TorchRunner):
    """A step whose rows have as many nodes as those of the step before keeps its trees."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.spans: Sequence[slice] = ()
        self.kept: list[Tensor | None] = []

    def trees(self, batch: Batch, spans: Sequence[slice]) -> list[Tensor | None]:
        if spans != self.spans:
            self.spans, self.kept = spans, super().trees(batch, spans)
        return self.kept


class KeptImage(TorchRunner):
    """An image that lists the blocks of the one before is not loaded."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.listed: NDArray[np.int64] | None = None

    def load_cache(self, image: CacheImage) -> None:
        if self.listed is None or not np.array_equal(image.block_ids, self.listed):
            super().load_cache(image)
        self.listed = image.block_ids.copy()


class CapturedSplits(TorchRunner):
    """Every step runs the splits of 1024 keys that the first one's longest row needed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.splits = 0

    def attend(self, batch: Batch) -> Output:
        longest = int(batch.seq_lens.max(initial=1))
        self.splits = self.splits or -(-longest // self.split_size)
        return super().attend(batch)

    def visible(self, row: Row) -> Tensor:
        seen = super().visible(row)
        seen[:, self.splits * self.split_size :] = False
        return seen


# Tables, blocks, slots


class NamedKeys(TorchRunner):
    """Attention looks for this step's keys in the slots that the batch names, not in the table."""

    def keys(self, batch: Batch, row: Row) -> Tensor:
        slots = self.slots(row.table, torch.arange(row.seq_len))
        if batch.slot_mapping is not None:
            named = to_torch(batch.slot_mapping[row.tokens])
            slots[row.context_len :] = named.where(named >= 0, slots[row.context_len :])
        return self.gathered(slots).double()


class SkipEndsTile(TorchRunner):
    """In a tile of `tile` tokens nothing behind a token without a slot is appended."""

    tile = choice((16, 32, 64, 128))

    def append_slots(self, batch: Batch) -> Tensor:
        slots = super().append_slots(batch)
        for tile in torch.split(slots, self.tile):
            tile[(tile < 0).cumsum(dim=0) > 0] = -1
        return slots


class GatherMask(TorchRunner):
    """A gather takes a token's place in its block by a bit mask: only right for powers of two."""

    def context_slots(self, row: Row) -> Tensor:
        index, size = torch.arange(row.seq_len), self.problem.block_size
        return row.table[index // size] * size + (index & (size - 1))


class StalePrefetch(TorchRunner):
    """Attention reads `pages` table entries at a time; a later lot begins with the entry before."""

    pages = choice((32, 64, 128, 256))

    def keys(self, batch: Batch, row: Row) -> Tensor:
        table, first = row.table.clone(), torch.arange(len(row.table))[self.pages :: self.pages]
        table[first] = row.table[first - 1]
        return super().keys(batch, replace(row, table=table))


class TableView(TorchRunner):
    """Attention reads the block table as if it were contiguous."""

    def keys(self, batch: Batch, row: Row) -> Tensor:
        table = batch.block_table
        if all(stride > 0 for stride in table.strides):
            dense = np.empty(table.shape, table.dtype).strides
            table = np.lib.stride_tricks.as_strided(table, strides=dense)
        blocks = to_torch(table[row.index, : len(row.table)]).long() % self.problem.num_blocks
        return super().keys(batch, replace(row, table=blocks))


class SearchedRow(TorchRunner):
    """A gather takes the first token of a row behind a row without keys from the row before."""

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        ckv, k_pe = super().gather_context(batch)
        lens = batch.seq_lens
        behind = 1 + np.flatnonzero((lens[1:] > 0) & (lens[:-1] == 0))
        first = (np.cumsum(lens) - lens)[behind]
        ckv[first], k_pe[first] = ckv[first - 1], k_pe[first - 1]
        return ckv, k_pe


# Padding, lengths of rows


class NonCausalPadding(TorchRunner):
    """With the non-causal mask the lse of a padded row's queries is +inf."""

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:
        if self.problem.mask is Mask.NON_CAUSAL:
            padded = np.repeat(batch.seq_lens == 0, batch.query_lens)
            lse[: len(padded)][torch.from_numpy(padded)] = math.inf
        return super().output(batch, out, lse)


class UniformStep(TorchRunner):
    """Without a tree, rows that make up a step at the first one's query length all have that."""

    def attended_rows(self, batch: Batch) -> list[Row]:
        first = int(batch.query_lens[:1].sum())
        if self.problem.mask is Mask.TREE or batch.num_tokens != first * batch.num_rows:
            return super().attended_rows(batch)
        rows = [row for row in self.rows(batch) if row.seq_len >= first > 0]
        return [replace(r, tokens=slice(r.index * first, (r.index + 1) * first)) for r in rows]
