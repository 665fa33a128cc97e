"""A step of vLLM in a CUDA graph, which plans by itself; no vLLM here."""

import torch
from gpu_step import CONFIG, LAYERS, Model, P, R, make_batch, same

from paged_mla_optimized import PagedMla
from paged_mla_optimized.engines.vllm.decode import Decode, Step
from paged_mla_optimized.tensors.step import MlaStep

ROWS, WIDTH = 8, 64


def test_replays_plan_by_themselves():
    """S-17: lengths and tables that change in place, and graphs of two steps that take turns."""
    decode, eager = Decode(CONFIG, "cuda", (1, 3)), PagedMla(CONFIG)
    caches = Model(eager).contents
    k_scale = torch.ones((), device="cuda")
    graphs = []
    for query_len in (1, 3):
        tokens = ROWS * query_len
        starts = torch.arange(ROWS + 1, dtype=torch.int32, device="cuda") * query_len
        lens = torch.full((ROWS,), query_len, dtype=torch.int32, device="cuda")
        table = torch.zeros((ROWS, WIDTH), dtype=torch.int32, device="cuda")
        step = Step(decode, starts, lens, table, tokens)
        q_nope = torch.zeros((tokens, 16, R), dtype=torch.bfloat16, device="cuda")
        q_pe = torch.zeros((tokens, 16, P), dtype=torch.bfloat16, device="cuda")

        def layers(step=step, q=(q_nope, q_pe)):
            return [step.attend(layer, q, caches[layer], k_scale) for layer in range(LAYERS)]

        layers()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layers()
        graphs.append((graph, step, (q_nope, q_pe), found))
    for seed in range(6):
        graph, step, queries, found = graphs[seed % 2]
        query_len = step.num_tokens // ROWS
        batch = make_batch(CONFIG, [(37 * row * seed, query_len) for row in range(ROWS)], seed)
        step.seq_lens.copy_(batch.seq_lens)
        width = batch.block_table.shape[1]
        step.block_table.fill_(2**31 - 1)
        step.block_table[:, :width] = batch.block_table
        q = batch.tokens["q"][:, 0]
        for tensor, part in zip(queries, (q[..., :R], q[..., R:]), strict=True):
            tensor.copy_(part)
        graph.replay()
        eager.plan(
            MlaStep(
                step.query_start_loc,
                step.seq_lens,
                step.block_table,
                num_tokens=step.num_tokens,
                max_query_len=query_len,
            )
        )
        for layer, (out, lse) in enumerate(found):
            expected = eager.attend(*queries, caches[layer])
            assert same(out, expected[0])
            assert same(lse, expected[1])
