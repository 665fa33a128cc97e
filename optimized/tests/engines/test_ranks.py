"""What the device counts for a rank is what the reference counts. S-18."""

import numpy as np
import pytest
import torch
from ci.installed import import_or_skip
from mla_step import config

from paged_mla_optimized.operations.shard.launch import Shard
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.problem import Batch, Problem

BLOCK_SIZE, LONGEST = 16, 300
ROWS = (  # (seq_len, query_len)
    *((n, 1) for n in (*range(40), 63, 64, 65, 127, 128, 129, 255, 256, 257)),
    *((n, 4) for n in (4, 7, 16, 31, 34, 130)),
    (LONGEST, 20),
)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4), (8, 2)])
def test_steps_of_ranks(world, interleave):
    """S-1, S-18: decode rows of many lengths, chains of four, a chunk, and padding."""
    oracle = import_or_skip("paged_mla_reference.rules.parallel")
    width = -(-LONGEST // (BLOCK_SIZE * world))
    starts = np.cumsum([0, *(queries for _, queries in ROWS)]).astype(np.int32)
    tokens = int(starts[-1]) + 2
    empty = np.zeros((tokens, 0), np.float32)
    order = np.random.default_rng(0).permutation(len(ROWS) * width).astype(np.int32)
    batch = Batch(
        cu_seqlens_q=starts,
        seq_lens=np.array([seq_len for seq_len, _ in ROWS], np.int32),
        block_table=order.reshape(len(ROWS), width),
        q_nope=empty, q_pe=empty, ckv=empty, k_pe=empty,
    )  # fmt: skip
    problem = Problem(
        dims=MlaDims(1, 4, 2, 3, 5), dtype="float32", cache_format="fp32", block_size=BLOCK_SIZE,
        num_blocks=len(ROWS) * width, max_rows=tokens, max_query_tokens=tokens,
        max_model_len=LONGEST, softmax_scale=1.0,
    )  # fmt: skip
    group = oracle.ContextParallel(world, interleave)
    cfg = config(
        block_size=BLOCK_SIZE, max_rows=len(ROWS), max_query_tokens=tokens, max_model_len=LONGEST
    )
    lengths = [torch.from_numpy(a) for a in (starts, batch.seq_lens, batch.block_table)]
    for rank in {0, 1, world - 1}:
        expected = oracle.rank_batch(problem, batch, group, rank)
        step = Shard(
            cfg, world=world, rank=rank, interleave=interleave, table_width=width,
            device=torch.device("cpu"),
        )  # fmt: skip
        step.launch(*lengths, tokens)
        assert step.local_lens.tolist() == expected.seq_lens.tolist()
        assert step.slot_mapping.tolist() == expected.slot_mapping.tolist()
        for token, seen in enumerate(expected.seq_lens):
            blocks = -(-int(seen) // BLOCK_SIZE)
            found = step.block_table[token, :blocks].tolist()
            assert found == expected.block_table[token, :blocks].tolist()
