"""Rows of a step over materialised keys: gather, project, attend and merge, part by part (S-21)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paged_mla_optimized.cache import Cache
from paged_mla_optimized.core import Core
from paged_mla_optimized.launchers.gather import Spans
from paged_mla_optimized.launchers.merge_tiles import MergeTiles
from paged_mla_optimized.launchers.parts import Part
from paged_mla_optimized.layer_config import LayerConfig
from paged_mla_optimized.prefill import Prefill
from paged_mla_optimized.weights import HeadWeights

Queries = tuple[torch.Tensor, torch.Tensor]  # q_nope and q_pe
Answer = tuple[torch.Tensor, torch.Tensor]  # out and lse


@dataclass(frozen=True)
class Rows:
    """The planned rows: lengths on the device, and what the host knows of them."""

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: int
    num_keys: int


class Materialised:
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
        chunk = replace(config.prefill, causal=False, writes_empty=False)
        self._spans = [Part(config.attention.max_rows, room, device) for _ in range(2)]
        self._attention = [Prefill(config.prefill, device), Prefill(chunk, device)]
        self._merge = MergeTiles(self._attention[1].tiles.tile_m, config.v_head_dim)

        def lines(width: int) -> torch.Tensor:
            return torch.empty((room, width), dtype=dtype, device=device)

        self._ckv, self._k_pe = (
            lines(config.attention.kv_lora_rank),
            lines(config.attention.qk_rope_head_dim),
        )
        self._keys_and_values = lines(config.projected)

    @property
    def parts(self) -> int:
        """Parts of the planned rows' keys."""
        return max(-(-self._rows.num_keys // self._room), 1)

    def plan(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        num_tokens: int,
        num_keys: int,
    ) -> None:
        """Describe rows whose tokens follow each other, `num_keys` keys at most. Two launches.

        ``cu_seqlens_q`` may begin anywhere; the rest is as for :meth:`PagedMla.plan`.
        """
        self._rows = Rows(cu_seqlens_q, seq_lens, block_table, num_tokens, num_keys)
        self.plan_part(0)

    def attend(self, queries: Queries, cache: Cache, weights: HeadWeights, answer: Answer) -> None:
        """Write the answer to the queries of the planned rows; lse in nats."""
        queries = self._rotated(queries)
        self.gather(0, cache)
        self.project(0, weights)
        self.attend_part(0, queries, answer)
        if self.parts == 1:
            return
        out = answer[0]
        rest = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
        chunk = torch.empty_like(rest), rest.new_empty(rest.shape[:2], dtype=torch.float32)
        for part in range(1, self.parts):
            self.plan_part(part)
            self.gather(part, cache)
            self.project(part, weights)
            self.attend_part(part, queries, chunk)
            self.merge(answer, rest, chunk)

    def plan_part(self, part: int) -> None:
        """Describe which keys a part has, and the work of attending to them."""
        rows, spans = self._rows, self._spans[part > 0]
        spans.fill(rows.cu_seqlens_q, rows.seq_lens, part, self._keys_of(part))
        tiles = self._attention[part > 0].tiles
        tiles.fill(spans.query_starts, spans.key_starts, rows.num_tokens)

    def gather(self, part: int, cache: Cache) -> None:
        """Read the latents of a planned part."""
        spans, keys = self._spans[part > 0], self._keys_of(part)
        tokens = Spans(self._rows.block_table, spans.key_starts, spans.firsts)
        self._core.gather(tokens, cache, self._ckv[:keys], self._k_pe[:keys])

    def project(self, part: int, weights: HeadWeights) -> None:
        """Make keys and values of every head of the latents that were gathered."""
        keys = self._keys_of(part)
        weights.materialise(self._ckv[:keys], self._keys_and_values[:keys])

    def attend_part(self, part: int, queries: Queries, answer: Answer) -> None:
        """Attend to what was projected; rows without keys in a later part are left as they are."""
        keys, config = self._keys_of(part), self._config
        widths = [config.qk_nope_head_dim, config.v_head_dim]
        heads = self._keys_and_values[:keys].view(keys, config.num_heads, sum(widths))
        k_nope, v = torch.split(heads, widths, dim=-1)
        out, lse = answer
        attention = self._attention[part > 0]
        attention.attend(*queries, k_nope, self._k_pe[:keys], v, out=out, lse=lse)

    def merge(self, answer: Answer, rest: torch.Tensor, chunk: Answer) -> None:
        """Merge what the last part answered into the answer so far and the `rest` of it (S-8)."""
        self._merge.launch(self._attention[1].tiles, answer, rest, chunk)

    def _keys_of(self, part: int) -> int:
        """Return the keys of a part, at most."""
        return min(self._rows.num_keys - part * self._room, self._room)

    def _rotated(self, queries: Queries) -> Queries:
        core, tokens = self._core, self._rows.num_tokens
        if core.rotate is None:
            return queries
        end = core.plan.num_tokens
        positions = core.plan.positions[end - tokens : end]
        return queries[0], core.rotate.launch(queries[1], positions)[:tokens]
