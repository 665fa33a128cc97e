from dataclasses import replace

import pytest
import torch
import triton
from gpu_step import CONFIG, CONFIGS, LAYERS, Model, P, R, make_batch, random_lens, same

from paged_mla_optimized import DraftSteps, ExtendWindow, LayerEvents, PagedMla
from paged_mla_optimized.tensors.step import MlaStep


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_neither_waits_nor_allocates(name):
    """S-17: plan and four layers, with synchronisation an error and the allocator's counter still.

    There are no host lengths to be wrong: no call takes one.
    """
    config = CONFIGS[name]
    model = Model(PagedMla(config))
    batches = [make_batch(config, random_lens(config, 9, 60, seed), seed) for seed in (1, 2, 3)]
    for batch in batches:
        model.eager(batch)
    torch.cuda.synchronize()
    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            model.plan(batch, batch.num_tokens)
            model.layers(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_compiles_in_a_warm_instance(name, monkeypatch):
    """Triton looks for no binary in any step, first ones of all lengths among them."""
    config = replace(CONFIGS[name], num_heads=28)  # of no other test, whose binaries are known
    model = Model(PagedMla(config))
    looked_for = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **found: looked_for.append(found["src"].name)
    )
    model.mla.warm_up(model.caches[0])
    assert looked_for
    looked_for.clear()
    for seed, (rows, tokens) in enumerate([(1, 1), (9, 9), (9, 60), (3, 90), (16, 128)]):
        model.eager(make_batch(config, random_lens(config, rows, tokens, seed), seed))
    assert looked_for == []


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["fixed", "parts"])
def test_rows_next_to_others(batch_invariant):
    """S-20: batch-invariant rows keep their bits next to any rows; without it they are close."""
    config = CONFIGS["batch_invariant" if batch_invariant else "causal"]
    model = Model(PagedMla(config))
    lens = random_lens(config, 8, 40, 5)
    together = make_batch(config, lens, 5)
    out, lse, _ = model.eager(together)
    starts = together.cu_seqlens_q.tolist()
    for row in range(8):
        mine = slice(starts[row], starts[row + 1])
        model.restore(together)
        model.mla.plan(
            MlaStep(
                together.cu_seqlens_q[row : row + 2] - starts[row],
                together.seq_lens[row : row + 1],
                together.block_table[row : row + 1],
                num_tokens=lens[row][1],
            )
        )
        q, kv = together.tokens["q"][mine], together.tokens["kv"][mine]
        for layer in range(LAYERS):
            cache = model.caches[layer]
            model.mla.append(kv[:, layer, :R], kv[:, layer, R:], cache)
            actual = model.mla.attend(q[:, layer, :, :R], q[:, layer, :, R:], cache)
            for one, all_ in zip(actual, (out[layer, mine], lse[layer, mine]), strict=True):
                if batch_invariant:
                    assert same(one, all_)
                torch.testing.assert_close(one.float(), all_.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("default")  # compilers deprecate parts of themselves
def test_compiled_step():
    """S-17: torch.compile takes the whole step as one graph, with the outputs of the eager step."""
    model = Model(PagedMla(CONFIG))
    batch = make_batch(CONFIG, random_lens(CONFIG, 9, 60, 1), 1)
    q, kv = batch.tokens["q"], batch.tokens["kv"]
    lengths = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)

    def step(caches):
        outs = []
        model.mla.plan(MlaStep(*lengths, num_tokens=len(q)))
        for layer in range(LAYERS):
            model.mla.append(kv[:, layer, :R], kv[:, layer, R:], caches[layer])
            out, _ = model.mla.attend(q[:, layer, :, :R], q[:, layer, :, R:], caches[layer])
            outs.append(out * 2)
        return torch.stack(outs)

    model.restore(batch)
    expected = step(model.caches).clone()
    after = model.caches.view(torch.int16).clone()
    model.restore(batch)
    assert same(torch.compile(step, fullgraph=True)(model.caches), expected)
    assert torch.equal(model.caches.view(torch.int16), after)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_layer_events(captured):
    """S-10: another stream reads layer 0 of the cache while the step is still at layer 1."""
    model = Model(PagedMla(CONFIG))
    batch = make_batch(CONFIG, random_lens(CONFIG, 9, 60, 1), 1)
    expected = model.eager(batch)[2][0]
    events = LayerEvents(LAYERS)
    kv = batch.tokens["kv"]

    def step():
        model.plan(batch, batch.num_tokens)
        torch.cuda._sleep(20_000_000)
        for layer in range(LAYERS):
            model.mla.append(kv[:, layer, :R], kv[:, layer, R:], model.caches[layer])
            events.record(layer)
            torch.cuda._sleep(200_000_000)

    step()
    torch.cuda.synchronize()
    run = step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    side, done, sent = torch.cuda.Stream(), torch.cuda.Event(), torch.empty_like(model.caches[0])
    for _ in range(3):
        model.restore(batch)
        sent.zero_()
        torch.cuda.synchronize()
        run()
        done.record()
        events.wait(0, side)
        with torch.cuda.stream(side):
            sent.copy_(model.caches[0])
        side.synchronize()
        assert not done.query()  # the step goes on
        assert torch.equal(sent.view(torch.int16), expected)
        events.synchronize(LAYERS - 1)
        torch.cuda.synchronize()


def test_drafts_in_one_graph():
    """S-15, S-16, S-17: a window, then three draft steps of two branches, recorded once."""
    requests, branches, steps, window, size = 3, 2, 3, 4, CONFIG.block_size
    mla = PagedMla(CONFIG)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(200, generator=generator).int().cuda()
    prefix_table = blocks[: requests * 8].view(requests, 8)
    branch_blocks = blocks[100 : 100 + requests * branches * 2].view(requests, branches, 2)
    committed = torch.zeros(requests, dtype=torch.int32, device="cuda")
    prefix_lens = torch.zeros_like(committed)
    drafts = DraftSteps(
        max_requests=requests, branches=branches, steps=steps, prefix_width=8, own_width=2,
        block_size=size, device="cuda",
    )  # fmt: skip
    extend = ExtendWindow(requests, window, "cuda")
    rows = requests * branches
    q = torch.randn(steps + 2, rows * 2, 16, R + P, device="cuda").bfloat16()
    kv = torch.randn(steps + 2, rows * 2, R + P, device="cuda").bfloat16()
    cache = torch.zeros(200, size, R + P, dtype=torch.bfloat16, device="cuda")
    outs = torch.zeros(steps + 1, rows * 2, 16, R, dtype=torch.bfloat16, device="cuda")

    def attend(step, tokens):
        mla.append(kv[step, :tokens, :R], kv[step, :tokens, R:], cache)
        mla.attend(q[step, :tokens, :, :R], q[step, :tokens, :, R:], cache, out=outs[step, :tokens])

    def draft():
        extend.fill(committed)
        mla.plan(
            MlaStep(
                extend.cu_seqlens_q, extend.seq_lens, prefix_table, num_tokens=requests * window
            )
        )
        attend(steps, requests * window)
        drafts.fill(prefix_lens, prefix_table, branch_blocks)
        drafts.copy_tails(cache, prefix_lens, prefix_table, branch_blocks)
        for step in range(steps):
            lens = drafts.seq_lens[step]
            mla.plan(MlaStep(drafts.cu_seqlens_q, lens, drafts.block_table, num_tokens=rows))
            attend(step, rows)

    draft()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft()
    for lens, accepted in (
        ((70, 3, 400), (1, 2, 4)),
        ((63, 0, 64), (4, 0, 3)),
        ((1, 1, 1), (1, 1, 1)),
    ):
        committed.copy_(torch.tensor(lens))
        prefix_lens.copy_(committed + torch.tensor(accepted, device="cuda"))
        results = []
        for run in (draft, graph.replay):
            cache.copy_(torch.arange(cache.numel(), device="cuda").view_as(cache) % 7)
            outs.fill_(torch.nan)
            run()
            results.append((outs.clone(), cache.clone()))
        assert same(results[0][0], results[1][0])
        assert same(results[0][1], results[1][1])
        assert results[1][0][:steps, :rows].isfinite().all()
