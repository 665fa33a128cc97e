import pytest
import torch
from gpu_step import (
    CONFIG,
    CONFIGS,
    Model,
    P,
    R,
    make_batch,
    random_lens,
    same,
    token_tensors,
)

from paged_mla_optimized import Bucket, GraphedStep, PagedMla, StaleGraph, StepInputs
from paged_mla_shared.errors import InvalidArgument

LONGEST = 64  # steps that are told the same get the same kernel, in whichever bucket
BUCKETS = tuple(Bucket(n, rows, LONGEST) for n, rows in ((1, 1), (8, 4), (32, 8), (128, 16)))
DECODE_BUCKETS = tuple(Bucket(n, n) for n in (1, 4, 8, 16))
PAIRS = 100


def graphed(config, buckets=BUCKETS):
    model = Model(PagedMla(config), buckets[0].max_query_len)
    inputs = StepInputs(config, "cuda", token_tensors(config))
    caches = list(model.caches)
    return model, GraphedStep([model.mla], model.layers, inputs, buckets, caches=caches)


@pytest.mark.parametrize("name", CONFIGS)
def test_replay_equals_eager(name):
    """S-17: 100 (capture, replay) pairs of each kind, over out, lse and every cached byte.

    Batches have fewer or more rows and tokens than the one before, longer and shorter rows,
    other blocks and masks, and follow replays of other graphs.
    """
    config = CONFIGS[name]
    model, step = graphed(config)
    pairs, seed = 0, 0
    while pairs < PAIRS:
        seed += 1
        bucket = BUCKETS[seed * 7 % 4]
        rows = 1 + seed * 5 % bucket.rows
        batch = make_batch(config, random_lens(config, rows, bucket.tokens, seed), seed)
        out, lse, cache = model.eager(batch)
        for bucket in BUCKETS:
            if bucket.rows < batch.rows or bucket.tokens < batch.num_tokens:
                continue
            model.restore(batch)
            step.inputs.poison()
            batch.load(step.inputs)
            outs, lses = step.replay(bucket.rows, bucket.tokens, LONGEST)
            n = batch.num_tokens
            assert same(outs[:, :n], out)
            assert same(lses[:, :n], lse)
            assert not outs[:, n:].any()
            assert (lses[:, n:] == -torch.inf).all()
            assert torch.equal(model.caches.view(torch.int16), cache)
            pairs += 1


def test_a_replay_is_the_planned_step():
    """S-17: what is read of a step outside its graph is of the replayed one, not the eager one."""
    model, step = graphed(CONFIG)
    batches = [make_batch(CONFIG, random_lens(CONFIG, 5, 20, seed), seed) for seed in range(3)]
    for batch, other in zip(batches, batches[1:] + batches[:1], strict=True):
        model.eager(batch)
        rows, tokens, keys = batch.rows, batch.num_tokens, int(batch.seq_lens.sum())
        cached, described = model.caches.clone(), [t.clone() for t in views(model.mla)]
        gathered = gather(model, keys)
        model.eager(other)
        batch.load(step.inputs)
        step.replay(rows, tokens, LONGEST)
        model.caches.copy_(cached)
        for mine, theirs in zip(views(model.mla), described, strict=True):
            assert torch.equal(mine[: len(theirs)], theirs)
        for mine, theirs in zip(gather(model, keys), gathered, strict=True):
            assert same(mine, theirs)


def views(mla):
    return mla.slot_mapping, mla.positions, mla.cu_seqlens_k


def gather(model, keys):
    found = [torch.zeros(keys, n, dtype=CONFIG.dtype, device="cuda") for n in (R, P)]
    model.mla.gather_context(model.cache(0), *found)
    return found


def test_decode_replays_equal_eager_decode():
    """S-17: what is taken for decode alone is taken for decode in every bucket of as many rows."""
    model, step = graphed(CONFIG, DECODE_BUCKETS)
    for rows in (1, 2, 7, 8, 16):
        batch = make_batch(CONFIG, [(37 * row * row % 2000, 1) for row in range(rows)], rows)
        out, lse, _ = model.eager(batch)
        for bucket in DECODE_BUCKETS:
            if bucket.rows < rows:
                continue
            model.restore(batch)
            step.inputs.poison()
            batch.load(step.inputs)
            outs, lses = step.replay(bucket.rows, bucket.tokens)
            assert same(outs[:, :rows], out)
            assert same(lses[:, :rows], lse)


def test_a_thousand_replays():
    """S-17: mixed batches of random row counts, in random order, have the same bits each time."""
    model, step = graphed(CONFIG)
    batches = [
        make_batch(CONFIG, random_lens(CONFIG, 1 + seed * 5 % 16, 128, seed), seed)
        for seed in range(20)
    ]
    expected = [model.eager(batch)[:2] for batch in batches]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        which = i * i * 7 % 20 if i % 3 else i % 20
        batch, (out, lse) = batches[which], expected[which]
        model.restore(batch)
        batch.load(step.inputs)
        outs, lses = step.replay(batch.rows, batch.num_tokens, LONGEST)
        n = batch.num_tokens
        wrong += (outs[:, :n] != out).any()
        wrong += (lses[:, :n] != lse).any()
    assert wrong.item() == 0


def test_warm_up_and_idle_replays_write_no_cache():
    """S-10: neither capturing nor an idle step changes a byte of any cache."""
    model = Model(PagedMla(CONFIG))
    model.caches.fill_(7.0)
    inputs = StepInputs(CONFIG, "cuda", token_tensors(CONFIG))
    step = GraphedStep([model.mla], model.layers, inputs, BUCKETS)
    inputs.poison()
    inputs.clear()
    outs, lses = step.replay(16, 128, LONGEST)
    assert (model.caches == 7.0).all()
    assert not outs.any()
    assert (lses == -torch.inf).all()


def test_capacity_changes_are_errors_until_recaptured():
    """S-17: no bucket for a larger step; a cache that moved; both cured by recapture."""
    small = BUCKETS[:2]
    model, step = graphed(CONFIG, small)
    batch = make_batch(CONFIG, [(100, 8)] * 5, 1)
    with pytest.raises(InvalidArgument, match="recapture"):
        step.replay(batch.rows, batch.num_tokens, LONGEST)
    held = step.replay(1, 1, LONGEST)  # an answer of the graphs before, and with it their memory
    step.recapture([*small, Bucket(64, 8, LONGEST)])
    del held
    out = model.eager(batch)[0]
    model.restore(batch)
    batch.load(step.inputs)
    assert same(step.replay(batch.rows, batch.num_tokens, LONGEST)[0][:, : batch.num_tokens], out)

    layer = model.caches[0].clone()
    kept = GraphedStep([model.mla], model.layers, step.inputs, small, caches=[layer])
    layer.set_(layer.clone())
    with pytest.raises(StaleGraph, match="recapture"):
        kept.replay(1, 1, LONGEST)
    kept.recapture(caches=[layer])
    kept.replay(1, 1, LONGEST)


def test_a_failed_capture_leaves_idle_inputs():
    """S-17: a model that raises while it is recorded; afterwards the same step is captured."""
    model, step = graphed(CONFIG, BUCKETS[:2])
    batch = make_batch(CONFIG, [(100, 2)] * 3, 1)
    out = model.eager(batch)[0]

    def broken(view):
        model.layers(view)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("while recording")

    step._model_fn = broken
    with pytest.raises(RuntimeError, match="while recording"):
        step.recapture()
    assert not step.inputs.cu_seqlens_q.any()
    with pytest.raises(StaleGraph, match="recapture"):
        step.replay(1, 1, LONGEST)
    step._model_fn = model.layers
    step.recapture()
    model.restore(batch)
    batch.load(step.inputs)
    assert same(step.replay(batch.rows, batch.num_tokens, LONGEST)[0][:, : batch.num_tokens], out)


def test_poisoned_and_shared_workspace():
    """S-9: NaN in all scratch memory, and another instance's graphs in between, change nothing."""
    model, step = graphed(CONFIG)
    other_config = CONFIGS["tree:qlen"]
    other = Model(PagedMla(other_config, workspace=model.mla.workspace), LONGEST)
    other_inputs = StepInputs(other_config, "cuda", token_tensors(other_config))
    other_step = GraphedStep([other.mla], other.layers, other_inputs, BUCKETS)
    pairs = []
    for owner, graph, config in ((model, step, CONFIG), (other, other_step, other_config)):
        batch = make_batch(config, random_lens(config, 9, 60, 3), 3)
        pairs.append((owner, graph, batch, owner.eager(batch)))
    for round_ in range(20):
        for owner, graph, batch, expected in pairs if round_ % 2 else pairs[::-1]:
            model.mla.workspace.fill_(torch.nan)
            owner.restore(batch)
            batch.load(graph.inputs)
            outs, lses = graph.replay(batch.rows, batch.num_tokens, LONGEST)
            assert same(outs[:, : batch.num_tokens], expected[0])
            assert same(lses[:, : batch.num_tokens], expected[1])
