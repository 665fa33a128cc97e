"""A step as arrays, which are the inputs of a backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.masks import spell_mask
from paged_mla_reference.rules.padding import UNREADABLE_BLOCK, pad_batch
from paged_mla_reference.rules.parallel import ContextParallel, rank_batch
from paged_mla_reference.simulator.model import Histories, ModelStandIn
from paged_mla_reference.simulator.step import Row, Step
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.problem import Batch, Mask, Problem, cu_seqlens_of


@dataclass(frozen=True)
class Layout:
    """Lengths and blocks of a step's real rows; names and types are those of ``Batch``."""

    cu_seqlens_q: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]


def lay_out(rows: tuple[Row, ...]) -> Layout:
    """Return the lengths and blocks of rows; unused table entries are not legal ids (S-9)."""
    query_lens = [row.query_len for row in rows]
    seq_lens = [row.context_len + row.query_len for row in rows]
    width = max((len(row.blocks) for row in rows), default=1)
    table = np.full((len(rows), width), UNREADABLE_BLOCK, np.int32)
    for b, row in enumerate(rows):
        table[b, : len(row.blocks)] = row.blocks
    return Layout(
        cu_seqlens_q=cu_seqlens_of(query_lens),
        seq_lens=np.array(seq_lens, np.int32),
        block_table=table,
    )


def batch_of(problem: Problem, step: Step, model: ModelStandIn, histories: Histories) -> Batch:
    """Return the step as one batch over an undivided cache, padded to its graph."""
    layout = lay_out(step.rows)
    states = [state for row in step.rows for state in histories.of_queries(row)]
    latents = [model.latent(state) for state in states]
    queries = [model.query(state) for state in states]
    dims, dtype = problem.dims, numpy_dtype(problem.dtype)

    def stacked(parts: list[NDArray[Any]], *inner: int) -> NDArray[Any]:
        return np.stack(parts) if parts else np.zeros((0, *inner), dtype)

    batch = Batch(
        **vars(layout),
        q_nope=stacked([q for q, _ in queries], dims.num_heads, dims.kv_lora_rank),
        q_pe=stacked([q for _, q in queries], dims.num_heads, dims.qk_rope_head_dim),
        ckv=stacked([c for c, _ in latents], dims.kv_lora_rank),
        k_pe=stacked([k for _, k in latents], dims.qk_rope_head_dim),
    )
    if step.mask is Mask.TREE:
        batch = replace(batch, mask=_mask(problem, step.rows, layout))
    return pad_batch(problem, batch, step.num_rows, step.num_tokens, step.padded_query_len)


def rank_batches(problem: Problem, batch: Batch, group: ContextParallel) -> list[Batch]:
    """Return the batch of each rank of a group, one batch per rank (S-18)."""
    if group.world == 1:
        return [batch]
    return [rank_batch(problem, batch, group, rank) for rank in range(group.world)]


def _mask(problem: Problem, rows: tuple[Row, ...], layout: Layout) -> NDArray[Any]:
    matrices = []
    for row in rows:
        matrix = np.zeros((row.query_len, row.query_len), bool)
        for node in range(row.query_len):
            matrix[node, row.ancestors(node)] = True
        matrices.append(matrix)
    spelling, most = problem.mask_spelling, problem.max_draft_tokens
    return spell_mask(matrices, spelling, layout.seq_lens, most)
