"""Attention of materialized rows: gather, project, attend and merge each key chunk (S-21)."""

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
    """Buffers of one chunk of the keys of some rows.

    Parameters
    ----------
    part : KeyChunk
        The keys of each row in this chunk.
    tiles : PrefillPlan
        The query tiles that attend to the chunk.
    """

    part: KeyChunk
    tiles: PrefillPlan

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer, by name."""
        return {"tiles": self.tiles.tiles, "work": self.tiles.work, "part": self.part.buffer}


class MaterializedPlan(NamedTuple):
    """The planned materialized rows of one step.

    Parameters
    ----------
    first : PlannedChunk
        The first chunk of their keys.
    step : MlaStep
        The rows.
    num_keys : int
        An upper bound of the keys of all rows.
    positions : int64 [T]
        The positions of their tokens.
    """

    first: PlannedChunk
    step: MlaStep
    num_keys: int
    positions: torch.Tensor

    def renew(self) -> None:
        """Set the sizes of this step in the buffers again, after a later step changed them."""
        part, tiles = self.first
        part.num_rows = tiles.num_rows = self.step.num_rows
        tiles.num_tokens = self.step.num_tokens


class Materialized:
    """Attention of rows to their keys in chunks that fit one workspace.

    The first chunk is planned once per step. Later chunks share one set of buffers, so every layer
    plans them again.

    Parameters
    ----------
    config : LayerConfig
    core : Core
        It reads the cache and, if the config has a rope, rotates queries.
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
        """Every buffer that all steps share, by name."""
        own = {"ckv": self._ckv, "k_pe": self._k_pe, "keys and values": self._keys_and_values}
        later = {f"later {name}": tensor for name, tensor in self._later.tensors.items()}
        return own | later

    def new_first_part(self) -> PlannedChunk:
        """Return first-chunk buffers for another step."""
        return self._new_chunk(is_later=False)

    def _new_chunk(self, *, is_later: bool) -> PlannedChunk:
        part = KeyChunk(self._max_rows, self._room, self._core.device)
        return PlannedChunk(part, self._attention[is_later].new_plan())

    def plan(
        self, first: PlannedChunk, step: MlaStep, *, num_keys: int, positions: torch.Tensor
    ) -> MaterializedPlan:
        """Plan rows whose tokens are consecutive and that have at most `num_keys` keys.

        This method launches two kernels. The first entry of the rows' ``cu_seqlens_q`` may be any
        number. `positions`, int64 [T], are used if the config has a rope.
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
        """Write the output and the natural lse of the planned rows to `answer`."""
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
        """Return the number of key chunks of the planned rows, at least 1."""
        return max(-(-plan.num_keys // self._room), 1)

    def plan_chunk(self, plan: MaterializedPlan, part: int) -> None:
        """Describe the keys of a chunk, and the query tiles that attend to them."""
        step, planned = plan.step, self._chunk_of(plan, part)
        lines = self._keys_of(plan, part)
        planned.part.fill(step.cu_seqlens_q, step.seq_lens, part, lines)
        query_starts, key_starts = planned.part.query_starts, planned.part.key_starts
        planned.tiles.fill(query_starts, key_starts, step.num_tokens)

    def gather(self, plan: MaterializedPlan, part: int, cache: Cache) -> None:
        """Gather the latents of a planned chunk from the cache."""
        spans, keys = self._chunk_of(plan, part).part, self._keys_of(plan, part)
        table = plan.step.block_table
        assert isinstance(table, torch.Tensor)
        tokens = Spans(table, spans.key_starts, spans.first_tokens)
        self._core.reader(Gather).read(
            tokens, self._core.as_cache(cache), ckv=self._ckv[:keys], k_pe=self._k_pe[:keys]
        )

    def project(self, plan: MaterializedPlan, part: int, weights: HeadWeights) -> None:
        """Compute the keys and values of every head from the gathered latents."""
        keys = self._keys_of(plan, part)
        weights.materialize(self._ckv[:keys], self._keys_and_values[:keys])

    def attend_chunk(
        self, plan: MaterializedPlan, part: int, queries: Queries, answer: Answer
    ) -> None:
        """Attend to the projected keys; in later chunks, rows without keys stay unchanged."""
        keys, config = self._keys_of(plan, part), self._config
        widths = [config.qk_nope_head_dim, config.v_head_dim]
        heads = self._keys_and_values[:keys].view(keys, config.num_heads, sum(widths))
        k_nope, v = torch.split(heads, widths, dim=-1)
        out, lse = answer
        attention = self._attention[part > 0]
        tensors = Heads(*queries, k_nope, self._k_pe[:keys], v)
        attention.attend_planned(self._chunk_of(plan, part).tiles, tensors, out=out, lse=lse)

    def merge(self, answer: Answer, rest: torch.Tensor, chunk: Answer) -> None:
        """Merge the output `chunk` into `answer`; `rest` keeps what rounding removes (S-8)."""
        self._merge.launch(self._later.tiles, answer, rest, chunk)

    def _chunk_of(self, plan: MaterializedPlan, part: int) -> PlannedChunk:
        return plan.first if part == 0 else self._later

    def _keys_of(self, plan: MaterializedPlan, part: int) -> int:
        """Return an upper bound of the keys of a chunk."""
        return min(plan.num_keys - part * self._room, self._room)
