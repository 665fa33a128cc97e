"""S-17: each call waits for all of a kernel in front that lets it start early and writes late.

With programmatic dependent launch, a kernel may let the one behind it begin before it has written
anything. Kernels of this package that begin early wait for it; the others begin after its end.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gpu_late import Operation, copy_hastily, write_late
from gpu_prefill import build
from gpu_step import CONFIG, Model, P, R, bits, instance_of, make_batch, random_lens, same

from paged_mla_optimized import (
    DraftSteps,
    ExtendWindow,
    HeadWeights,
    LatentCache,
    LayerConfig,
    MlaConfig,
    MlaLayer,
    Prefill,
    RequestMap,
    merge_partials,
)
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_optimized.planning.families import FEW, FEW_FP8, PORTABLE, TILE, TILE_EXACT, TILE_FP8
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

DECODE = replace(CONFIG, max_query_tokens=CONFIG.max_rows)
E4M3 = replace(CONFIG, cache_format="fp8_e4m3")
EXACT = replace(E4M3, num_heads=128)
FAST = replace(EXACT, products="fast")
ROPE = {"rope": Rope(RopePairing.INTERLEAVED)}
RAGGED = [(2000, 1), (0, 0), (63, 1), (0, 1), (700, 1), (64, 1), (3900, 1), (1, 1)]
MIXED = random_lens(CONFIG, 13, 100, 3)
TREES = [(100, 8), (333, 5), (0, 0), (64, 8), (0, 3)]
STEPS = {  # the kernel that serves it on Hopper, the config, the rows
    "few": (FEW, DECODE, RAGGED),
    "few-rope": (FEW, replace(DECODE, **ROPE), RAGGED),
    "tile": (TILE, replace(CONFIG, num_heads=128), MIXED),
    "tile-rope": (TILE, replace(CONFIG, num_heads=128, **ROPE), MIXED),
    "tile-tree": (
        TILE, replace(CONFIG, num_heads=128, mask="tree:qlen", max_draft_tokens=8), TREES,
    ),
    "few-fp8": (FEW_FP8, E4M3, RAGGED),
    "few-fp8-rope": (FEW_FP8, replace(E4M3, **ROPE), RAGGED),
    "tile-exact": (TILE_EXACT, EXACT, MIXED),
    "tile-exact-rope": (TILE_EXACT, replace(EXACT, **ROPE), MIXED),
    "tile-exact-token-scales": (
        TILE_EXACT, replace(EXACT, cache_format="fp8_block_token"), MIXED,
    ),
    "tile-fp8": (TILE_FP8, FAST, MIXED),
    "tile-fp8-rope": (TILE_FP8, replace(FAST, **ROPE), MIXED),
    "tile-fp8-group-scales": (TILE_FP8, replace(FAST, cache_format="fp8_block_group"), MIXED),
    "portable": (PORTABLE, CONFIG, MIXED),
    "portable-rope": (PORTABLE, replace(CONFIG, **ROPE), MIXED),
    "portable-table": (PORTABLE, replace(CONFIG, table_multiple=1), MIXED),
    "portable-fp8": (PORTABLE, E4M3, MIXED),
    "portable-rows-with-scales": (PORTABLE, replace(CONFIG, cache_format="fp8_ds_mla"), MIXED),
}  # fmt: skip
MODES = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


@pytest.fixture(autouse=True)
def _needs_dependent_launch():
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        pytest.skip(f"sm{major}{minor} has no programmatic dependent launch")


def assert_waits(operation, captured):
    """Let each input come late in turn."""
    expected = operation.expected()
    for name, (tensor, stale) in operation.inputs.items():
        right = tensor.clone()
        operation.reset()
        tensor.copy_(stale)
        operation.run()
        hasty = [answer.clone() for answer in operation.answers()]
        tensor.copy_(right)
        assert not all(map(same, hasty, expected)), f"{name}: outputs do not depend on it"
        for answers in operation.behind_late(name, captured=captured):
            assert all(map(same, answers, expected)), f"{name}: read before it was written"


@MODES
def test_a_kernel_that_does_not_wait_reads_what_was_there_before(captured):
    """The kernel in front does what these tests are about, eagerly and in a graph."""
    right = torch.full((1 << 20,), 7, device="cuda")
    late, found = torch.zeros_like(right), torch.zeros_like(right)

    def step():
        write_late(late, right, 100 if captured else 1000)
        copy_hastily(found, late)

    step()
    start = step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        start = graph.replay
    late.zero_()
    torch.cuda.synchronize()
    start()
    torch.cuda.synchronize()
    assert not found.any()
    assert (late == 7).all()


class Step:
    """A planned step of one layer, by the kernel that a name in ``STEPS`` is for."""

    def __init__(self, name):
        family, config, lens = STEPS[name]
        longest = max(query for _, query in lens)
        self.model = Model(instance_of(family, config, longest), longest)
        self.batch = make_batch(config, lens, 1)
        self.q, self.kv = self.batch.tokens["q"], self.batch.tokens["kv"]
        self.out, self.lse = (t[0, : len(self.q)] for t in (self.model.outs, self.model.lses))

    @property
    def mla(self):
        return self.model.mla

    @property
    def cache(self):
        return self.model.cache(0)

    @property
    def cached(self):
        """What comes late of the cache: latents, and scales if there are any."""
        model, late = self.model, {}
        late["cache"] = model.caches[0], torch.zeros_like(model.caches[0])
        if model.scales is not None:
            late["scales"] = model.scales[0], torch.ones_like(model.scales[0])
        return late

    def plan(self):
        self.model.plan(self.batch, self.batch.num_tokens)

    def append(self, slots=None):
        self.mla.append(self.kv[:, 0, :R], self.kv[:, 0, R:], self.cache, slots)

    def attend(self):
        q = self.q[:, 0]
        self.mla.attend(q[..., :R], q[..., R:], self.cache, out=self.out, lse=self.lse)

    def clear(self):
        self.model.outs.fill_(torch.nan)
        self.model.lses.fill_(torch.nan)

    def appended(self):
        self.model.restore(self.batch)
        self.plan()
        self.append()
        self.clear()

    def written(self):
        scales = self.model.scales
        return (bits(self.model.caches[0]), *(() if scales is None else (scales[0],)))


@MODES
@pytest.mark.parametrize("name", STEPS)
def test_attend(name, captured):
    """Queries and the cache come late."""
    step = Step(name)
    step.appended()
    inputs = {"q": (step.q, torch.zeros_like(step.q)), **step.cached}
    operation = Operation(step.appended, step.attend, lambda: (step.out, step.lse), inputs)
    assert_waits(operation, captured)


@MODES
@pytest.mark.parametrize("name", ["tile", "tile-tree", "tile-fp8", "portable"])
def test_plan(name, captured):
    """Lengths, the table and a mask come late; what is planned is used at once."""
    step = Step(name)
    step.appended()
    batch = step.batch

    def run():
        step.plan()
        step.attend()

    late = {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_table,
    }
    if batch.mask is not None:
        late["mask"] = batch.mask
    inputs = {key: (tensor, torch.zeros_like(tensor)) for key, tensor in late.items()}

    def answers():
        return step.mla.positions, step.mla.slot_mapping, step.out, step.lse

    assert_waits(Operation(step.appended, run, answers, inputs), captured)


@MODES
def test_plan_of_a_request_map(captured):
    """The engine's own table and the requests of the rows come late."""
    step = Step("portable-table")
    step.appended()
    batch = step.batch
    table = batch.block_table
    slots = (table.clamp(max=2**24)[:, :, None] * 64 + torch.arange(64, device="cuda")).int()
    slots = slots.flatten(1).contiguous()
    requests = torch.arange(batch.rows, device="cuda", dtype=torch.int32)
    request_map = RequestMap(slots, requests)

    def run():
        lengths = batch.cu_seqlens_q, batch.seq_lens, request_map
        step.mla.plan(MlaStep(*lengths, num_tokens=batch.num_tokens))
        step.attend()

    inputs = {
        "slots": (slots, torch.zeros_like(slots)),
        "requests": (requests, torch.zeros_like(requests)),
    }
    operation = Operation(step.appended, run, lambda: (step.out, step.lse), inputs)
    assert_waits(operation, captured)


@MODES
@pytest.mark.parametrize(
    "name", ["tile", "tile-rope", "tile-exact", "tile-exact-token-scales", "tile-fp8-group-scales",
             "portable-rows-with-scales"],
)  # fmt: skip
def test_append(name, captured):
    """Latents, keys and named slots come late."""
    step = Step(name)
    step.model.restore(step.batch)
    step.plan()
    slots = step.mla.slot_mapping.clone()
    inputs = {
        "kv": (step.kv, torch.zeros_like(step.kv)),
        "slot_mapping": (slots, torch.full_like(slots, -1)),
    }
    operation = Operation(
        lambda: step.model.restore(step.batch), lambda: step.append(slots), step.written, inputs
    )
    assert_waits(operation, captured)


@MODES
@pytest.mark.parametrize("name", ["tile", "tile-exact-token-scales", "portable-rows-with-scales"])
def test_gather_context(name, captured):
    """The cache comes late."""
    step = Step(name)
    step.appended()
    tokens = int(step.batch.seq_lens.sum())
    ckv, k_pe = (
        torch.empty(tokens, width, dtype=step.mla.config.dtype, device="cuda") for width in (R, P)
    )

    def reset():
        step.appended()
        ckv.fill_(torch.nan)
        k_pe.fill_(torch.nan)

    operation = Operation(
        reset,
        lambda: step.mla.gather_context(step.cache, ckv, k_pe),
        lambda: (ckv, k_pe),
        step.cached,
    )
    assert_waits(operation, captured)


@MODES
@pytest.mark.parametrize("is_given", [False, True], ids=["own-scales", "given-scale"])
def test_quantize_queries(is_given, captured):
    """Queries, and the scale that is given, come late."""
    step = Step("tile-fp8")
    step.appended()
    scale = torch.tensor(0.25, device="cuda")
    found = []

    def run():
        q = step.q[:, 0]
        given = scale if is_given else None
        found[:] = step.mla.quantize_queries(q[..., :R], q[..., R:], scale=given)

    inputs = {"q": (step.q, torch.zeros_like(step.q))}
    if is_given:
        inputs["scale"] = scale, torch.ones_like(scale)
    operation = Operation(step.appended, run, lambda: tuple(found), inputs)
    assert_waits(operation, captured)


@MODES
def test_merge_partials(captured):
    """Partial results and their lse come late."""
    outs = torch.randn(3, 70, 16, R, device="cuda")
    lses = torch.randn(3, 70, 16, device="cuda")
    found = []
    inputs = {"outs": (outs, torch.zeros_like(outs)), "lses": (lses, torch.zeros_like(lses))}
    operation = Operation(
        lambda: None,
        lambda: found.__setitem__(slice(None), merge_partials(outs, lses)),
        lambda: tuple(found),
        inputs,
    )
    assert_waits(operation, captured)


@MODES
def test_draft_steps(captured):
    """Prefixes and blocks of branches come late, and the cache whose tails are copied."""
    drafts = DraftSteps(
        max_requests=3, branches=2, steps=3, prefix_width=4, own_width=2, block_size=64,
        device="cuda",
    )  # fmt: skip
    prefix_lens = torch.tensor([100, 64, 200], dtype=torch.int32, device="cuda")
    prefix_table = torch.arange(12, dtype=torch.int32, device="cuda").view(3, 4)
    branch_blocks = torch.arange(12, 24, dtype=torch.int32, device="cuda").view(3, 2, 2)
    cache, contents = (torch.randn(24, 64, R + P, device="cuda").bfloat16() for _ in range(2))

    def reset():
        cache.copy_(contents)
        drafts.seq_lens.zero_()
        drafts.block_table.fill_(-1)

    def run():
        drafts.fill(prefix_lens, prefix_table, branch_blocks)
        drafts.copy_tails(cache, prefix_lens, prefix_table, branch_blocks)

    late = {"prefix_lens": prefix_lens, "prefix_table": prefix_table, "blocks": branch_blocks}
    inputs = {name: (tensor, torch.zeros_like(tensor)) for name, tensor in late.items()}

    def answers():
        return drafts.seq_lens, drafts.block_table, cache

    assert_waits(Operation(reset, run, answers, inputs), captured)
    reset()
    copy = Operation(
        reset,
        lambda: drafts.copy_tails(cache, prefix_lens, prefix_table, branch_blocks),
        lambda: (cache[12:].clone(),),
        {"cache": (cache, torch.zeros_like(cache))},
    )
    drafts.fill(prefix_lens, prefix_table, branch_blocks)
    assert_waits(copy, captured)


@MODES
def test_extend_window(captured):
    """Committed lengths come late."""
    window = ExtendWindow(4, 3, "cuda")
    committed = torch.tensor([5, 0, 70, 9], dtype=torch.int32, device="cuda")
    operation = Operation(
        window.seq_lens.zero_,
        lambda: window.fill(committed),
        lambda: (window.seq_lens,),
        {"committed": (committed, torch.zeros_like(committed))},
    )
    assert_waits(operation, captured)


@MODES
@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=["hopper", "portable"])
def test_prefill(dims, captured):
    """Prefix sums, queries, keys and values come late."""
    nope, value = dims
    rows = [(900, 5), (333, 128), (192, 64), (0, 3), (4097, 1)]
    step = build(rows, qk_nope_head_dim=nope, v_head_dim=value)
    prefill = Prefill(step.config)
    starts, tensors = step.lens, step.tensors
    tokens = len(tensors[0])
    out = torch.empty(tokens, step.config.num_heads, value, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(tokens, step.config.num_heads, device="cuda")

    def reset():
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        prefill.plan(*starts, num_tokens=tokens)

    def attend():
        prefill.attend(*tensors, out=out, lse=lse)

    def run():
        prefill.plan(*starts, num_tokens=tokens)
        attend()

    names = ("q_nope", "q_pe", "k_nope", "k_pe", "v")
    late = {name: (t, torch.zeros_like(t)) for name, t in zip(names, tensors, strict=True)}
    assert_waits(Operation(reset, attend, lambda: (out, lse), late), captured)
    lens = {
        name: (t, torch.zeros_like(t))
        for name, t in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)
    }
    assert_waits(Operation(reset, run, lambda: (out, lse), lens), captured)


@MODES
@pytest.mark.parametrize("absorbed_rows", [0, 1, 2], ids=["materialized", "mixed", "absorbed"])
def test_layer(absorbed_rows, captured):
    """Queries, the cache and the layer's weights come late."""
    attention = MlaConfig(
        num_heads=16, softmax_scale=192**-0.5, block_size=64, max_rows=2, max_query_tokens=256,
        max_model_len=2048,
    )  # fmt: skip
    layer = MlaLayer(LayerConfig(attention=attention, workspace_tokens=2048))
    generator = torch.Generator("cuda").manual_seed(2)

    def normal(*sizes, scale=1.0):
        return (torch.randn(sizes, generator=generator, device="cuda") * scale).bfloat16()

    cache, up, q = normal(40, 64, R + P), normal(16, 256, R, scale=R**-0.5), normal(129, 16, 192)
    weights = HeadWeights(up, 128)
    table = torch.randperm(40, generator=generator, device="cuda").int().view(2, 20)
    starts = torch.tensor([0, 1, 129], dtype=torch.int32, device="cuda")
    lens = torch.tensor([1000, 1128], dtype=torch.int32, device="cuda")
    out = torch.empty(129, 16, 128, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(129, 16, device="cuda")

    def reset():
        host = {"query_lens": [1, 128], "max_seq_lens": [1000, 1128]}
        layer.plan(
            MlaStep(starts, lens, table, num_tokens=129, **host), absorbed_rows=absorbed_rows
        )
        out.fill_(torch.nan)
        lse.fill_(torch.nan)

    def run():
        latents = LatentCache("bf16", cache, None)
        layer.attend(q[..., :128], q[..., 128:], latents, weights, out=out, lse=lse)

    late = {"q": q, "cache": cache, "weights": up}
    inputs = {name: (tensor, torch.zeros_like(tensor)) for name, tensor in late.items()}
    assert_waits(Operation(reset, run, lambda: (out, lse), inputs), captured)


@pytest.fixture
def group(tmp_path):
    """Return a group of this process alone, over NCCL."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@MODES
def test_a_divided_cache(group, captured):
    """Lengths and the table of whole rows come late, then queries and the cache."""
    step = Step("portable")
    step.appended()
    mla, batch, q = ContextParallelMla(step.mla.config, group), step.batch, step.q[:, 0]
    lengths = {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_table,
    }

    def plan():
        mla.plan(MlaStep(*lengths.values(), num_tokens=batch.num_tokens))

    def attend():
        mla.attend(q[..., :R], q[..., R:], step.cache, out=step.out, lse=step.lse)

    def run():
        plan()
        attend()

    def reset():
        step.appended()
        plan()

    def answers():
        return step.out, step.lse

    late = {name: (tensor, torch.zeros_like(tensor)) for name, tensor in lengths.items()}
    assert_waits(Operation(reset, run, answers, late), captured)
    late = {"q": (step.q, torch.zeros_like(step.q)), **step.cached}
    assert_waits(Operation(reset, attend, answers, late), captured)
