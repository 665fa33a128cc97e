"""Rows of a step over materialized keys: gather, project, attend and merge, part by part (S-21)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.layer import LayerConfig
from paged_mla_optimized.operations.gather.launch import Gather, Spans
from paged_mla_optimized.operations.merge.tiles import MergeTiles
from paged_mla_optimized.operations.prefill.key_chunks import KeyChunk
from paged_mla_optimized.operations.prefill.portable import Heads, PrefillPlan
from paged_mla_optimized.tensors.head_weights import HeadWeights
from paged_mla_optimized.tensors.latent_cache import Cache
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep


class PlannedChunk(NamedTuple):
    """Buffers of one part of the keys of some rows.

    Parameters
    ----------
    part : KeyChunk
        Which keys of each row it has.
    tiles : PrefillPlan
        The query tiles that attend to them.
    """

    part: KeyChunk
    tiles: PrefillPlan

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer, by name."""
        return {"tiles": self.tiles.tiles, "work": self.tiles.work, "part": self.part.buffer}


class MaterializedPlan(NamedTuple):
    """Planned rows of one step.

    Parameters
    ----------
    first : PlannedChunk
        The first part of their keys.
    step : MlaStep
        The rows.
    num_keys : int
        Keys of all rows, at most.
    positions : int64 [T]
        Of their tokens.
    """

    first: PlannedChunk
    step: MlaStep
    num_keys: int
    positions: torch.Tensor

    def renew(self) -> None:
        """Give the buffers the sizes of this step again, which a later one has changed."""
        part, tiles = self.first
        part.num_rows = tiles.num_rows = self.step.num_rows
        tiles.num_tokens = self.step.num_tokens


class Materialized:
    """Attends to the keys of some rows in parts that fit one workspace.

    The first part, which has the rows' own tokens, is planned once a step, further ones in every
    layer: their number is not bounded by any capacity.

    Parameters
    ----------
    config : LayerConfig
    core : Core
        Reads the cache, and rotates queries where it has a rope.
    """

    def __init__(self, config: LayerConfig, core: Core) -> None:
        device, dtype, room = core.device, config.attention.dtype, config.room
        self._room, self._config, self._core = room, config.prefill, core
        self._max_rows = config.attention.max_rows
        later = replace(config.prefill, causal=False, writes_empty=False)
        self._attention = [Prefill(config.prefill, device), Prefill(later, device)]
        self._later = self._new_chunk(is_later=True)
        self._merge = MergeTiles(self._attention[1].tiles.tile_m, later)

        def lines(width: int) -> torch.Tensor:
            return torch.empty((room, width), dtype=dtype, device=device)

        self._ckv, self._k_pe = (
            lines(config.attention.kv_lora_rank),
            lines(config.attention.qk_rope_head_dim),
        )
        self._keys_and_values = lines(config.projected)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer that steps share, by name."""
        own = {"ckv": self._ckv, "k_pe": self._k_pe, "keys and values": self._keys_and_values}
        later = {f"later {name}": tensor for name, tensor in self._later.tensors.items()}
        return own | later

    def new_first_part(self) -> PlannedChunk:
        """Return buffers for one more step."""
        return self._new_chunk(is_later=False)

    def _new_chunk(self, *, is_later: bool) -> PlannedChunk:
        part = KeyChunk(self._max_rows, self._room, self._core.device)
        return PlannedChunk(part, self._attention[is_later].new_plan())

    def plan(
        self, first: PlannedChunk, step: MlaStep, *, num_keys: int, positions: torch.Tensor
    ) -> MaterializedPlan:
        """Describe rows whose tokens follow each other, `num_keys` keys at most. Two launches.

        The first entry of their ``cu_seqlens_q`` may be any number. `positions`, int64 [T], are
        read where the config has a rope.
        """
        plan = MaterializedPlan(first, step, num_keys, positions)
        self.plan_chunk(plan, 0)
        return plan

    def attend(
        self,
        plan: MaterializedPlan,
        queries: Queries,
        cache: Cache,
        weights: HeadWeights,
        answer: Answer,
    ) -> None:
        """Write the answer to the queries of planned rows; lse in nats."""
        if self._core.rotate is not None:
            rotated = self._core.rotate.launch(queries.pe, plan.positions)
            queries = Queries(queries.nope, rotated[: len(plan.positions)])
        self.gather(plan, 0, cache)
        self.project(plan, 0, weights)
        self.attend_chunk(plan, 0, queries, answer)
        parts = self.parts(plan)
        if parts == 1:
            return
        out = answer.out
        rest = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
        lse = rest.new_empty(rest.shape[:2], dtype=torch.float32)
        chunk = Answer(torch.empty_like(rest), lse)
        for part in range(1, parts):
            self.plan_chunk(plan, part)
            self.gather(plan, part, cache)
            self.project(plan, part, weights)
            self.attend_chunk(plan, part, queries, chunk)
            self.merge(answer, rest, chunk)

    def parts(self, plan: MaterializedPlan) -> int:
        """Return in how many parts the keys of planned rows come."""
        return max(-(-plan.num_keys // self._room), 1)

    def plan_chunk(self, plan: MaterializedPlan, part: int) -> None:
        """Describe which keys a part has, and the work of attending to them."""
        step, planned = plan.step, self._chunk_of(plan, part)
        lines = self._keys_of(plan, part)
        planned.part.fill(step.cu_seqlens_q, step.seq_lens, part, lines)
        query_starts, key_starts = planned.part.query_starts, planned.part.key_starts
        planned.tiles.fill(query_starts, key_starts, step.num_tokens)

    def gather(self, plan: MaterializedPlan, part: int, cache: Cache) -> None:
        """Read the latents of a planned part."""
        spans, keys = self._chunk_of(plan, part).part, self._keys_of(plan, part)
        table = plan.step.block_table
        assert isinstance(table, torch.Tensor)
        tokens = Spans(table, spans.key_starts, spans.first_tokens)
        self._core.reader(Gather).read(
            tokens, self._core.as_cache(cache), ckv=self._ckv[:keys], k_pe=self._k_pe[:keys]
        )

    def project(self, plan: MaterializedPlan, part: int, weights: HeadWeights) -> None:
        """Make keys and values of every head of the latents that were gathered."""
        keys = self._keys_of(plan, part)
        weights.materialize(self._ckv[:keys], self._keys_and_values[:keys])

    def attend_chunk(
        self, plan: MaterializedPlan, part: int, queries: Queries, answer: Answer
    ) -> None:
        """Attend to what was projected; rows without keys in a later part are left as they are."""
        keys, config = self._keys_of(plan, part), self._config
        widths = [config.qk_nope_head_dim, config.v_head_dim]
        heads = self._keys_and_values[:keys].view(keys, config.num_heads, sum(widths))
        k_nope, v = torch.split(heads, widths, dim=-1)
        out, lse = answer
        attention = self._attention[part > 0]
        tensors = Heads(*queries, k_nope, self._k_pe[:keys], v)
        attention.attend_planned(self._chunk_of(plan, part).tiles, tensors, out=out, lse=lse)

    def merge(self, answer: Answer, rest: torch.Tensor, chunk: Answer) -> None:
        """Merge what the last part answered into the answer so far and the `rest` of it (S-8)."""
        self._merge.launch(self._later.tiles, answer, rest, chunk)

    def _chunk_of(self, plan: MaterializedPlan, part: int) -> PlannedChunk:
        return plan.first if part == 0 else self._later

    def _keys_of(self, plan: MaterializedPlan, part: int) -> int:
        """Return the keys of a part, at most."""
        return min(plan.num_keys - part * self._room, self._room)
