import numpy as np
import pytest
import torch

from paged_mla_optimized import backend
from paged_mla_optimized.backend import modes
from paged_mla_optimized.serving.graph import GraphedStep
from paged_mla_shared.dims import DEEPSEEK_V3
from paged_mla_shared.problem import Batch, Problem

PROBLEM = Problem(
    dims=DEEPSEEK_V3.with_heads(16),
    dtype="float16",
    cache_format="fp16",
    block_size=64,
    num_blocks=32,
    max_rows=4,
    max_query_tokens=16,
    max_model_len=512,
    softmax_scale=192**-0.5,
)


def make_batch(seed, *rows):
    """Return a step of rows (seq_len, query_len), every row in blocks of its own."""
    rng = np.random.default_rng(seed)
    query_lens = [query_len for _, query_len in rows]
    tokens, dims = sum(query_lens), PROBLEM.dims

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    return Batch(
        cu_seqlens_q=np.cumsum([0, *query_lens]).astype(np.int32),
        seq_lens=np.array([seq_len for seq_len, _ in rows], np.int32),
        block_table=rng.permutation(32)[: 8 * len(rows)].reshape(-1, 8).astype(np.int32),
        q_nope=normal(tokens, dims.num_heads, dims.kv_lora_rank),
        q_pe=normal(tokens, dims.num_heads, dims.qk_rope_head_dim),
        ckv=normal(tokens, dims.kv_lora_rank),
        k_pe=normal(tokens, dims.qk_rope_head_dim),
    )


# Each has more tokens than rows, as the buckets have: the same kernel serves both (choice.py).
BATCHES = [
    make_batch(1, (500, 1), (64, 1), (3, 3)),
    make_batch(2, (2, 2)),
    make_batch(3, (400, 8), (70, 1), (0, 0), (129, 2)),
]


def answers(runner, batch):
    """Return positions, slots, out, lse and the cache after a step."""
    runner.append(batch)
    found = [*vars(runner.plan(batch)).values(), *vars(runner.attend(batch)).values()]
    return [*found, runner.read_cache(np.arange(PROBLEM.num_blocks))]


@pytest.mark.filterwarnings("default")  # compilers deprecate parts of themselves
@pytest.mark.parametrize("name", ["graphed", "compiled"])
def test_bits_are_those_of_eager_steps(name):
    """S-17: positions, slots, outputs and the cache, batch after batch on one runner."""
    mine, eager = (each.prepare(PROBLEM) for each in (getattr(modes, name)(), backend.create()))
    for batch in [*BATCHES, *BATCHES]:
        for found, expected in zip(answers(mine, batch), answers(eager, batch), strict=True):
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["graphed", "compiled"])
def test_a_single_key_is_returned_by_every_kernel(name):
    """S-22: as many tokens as rows, fewer than the bucket of a graph; the output has one value."""
    batch = make_batch(2, (1, 1))
    for backend_of_mode in (getattr(modes, name)(), backend.create()):
        runner = backend_of_mode.prepare(PROBLEM)
        runner.append(batch)
        runner.plan(batch)
        assert (runner.attend(batch).out == batch.ckv[:, None]).all()


def test_a_graphed_runner_replays(monkeypatch):
    """S-17: once recorded, no batch launches anything but graphs; each call replays one."""
    runner = modes.graphed().prepare(PROBLEM)
    expected = [answers(runner, batch) for batch in BATCHES]
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(GraphedStep, "run_eagerly", None)
    for call in ("plan", "append", "attend"):
        monkeypatch.setattr(runner._mla, call, None)
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))
    )
    runner._memory._storage.zero_()
    again = [answers(runner, batch) for batch in BATCHES]
    assert len(replays) == 3 * len(BATCHES)
    assert len(set(map(id, replays))) == 6  # three calls in two buckets
    for found, first in zip(again, expected, strict=True):
        for mine, theirs in zip(found, first, strict=True):
            assert mine.tobytes() == theirs.tobytes()
