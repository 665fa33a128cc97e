"""The API under torch.compile: ops with declared mutations, in one graph."""

import pytest
import torch
from mla_step import P, R, build
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from paged_mla_optimized import LayerConfig, MlaLayer, PagedMla, RequestMap
from paged_mla_optimized.api import torch_ops as ops
from paged_mla_optimized.operations.merge.partials import merge, merge_partials
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def whole_step(mla, step, latents, cache):
    """Plan, then two layers of append and attend on caches that share nothing."""
    outs = []
    mla.plan(step.described)
    for layer in range(2):
        mla.append(latents[layer, :, :R], latents[layer, :, R:], cache[layer])
        outs.append(mla.attend(step.q_nope, step.q_pe, cache[layer])[0].clone())
    return torch.stack(outs)


@pytest.mark.parametrize("rope", [None, Rope(RopePairing.NEOX)], ids=["plain", "rope"])
def test_a_compiled_step_is_the_eager_one(rope):
    """S-17: one graph without breaks; caches and outputs are equal bit for bit."""
    step = build((40, 3), (17, 1), (0, 1), padded_tokens=1, rope=rope)
    latents = torch.randn(2, 6, R + P, generator=torch.Generator().manual_seed(0))
    caches = [torch.stack([step.cache, step.cache]) for _ in range(2)]
    mla = PagedMla(step.config, "cpu")
    eager = whole_step(mla, step, latents, caches[0])
    compiled = torch.compile(whole_step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(mla, step, latents, caches[1]), eager)
    assert torch.equal(caches[0].view(torch.int32), caches[1].view(torch.int32))


def mapped():
    """Return a step, and where its requests' tokens are."""
    slots = torch.arange(256, dtype=torch.int32)[None, :] + torch.tensor([[64], [0]])
    request_map = RequestMap(slots.int(), torch.tensor([1, 0]))
    return build((20, 1), (33, 2), table_multiple=1), request_map


def test_a_compiled_step_with_a_built_table():
    """S-1: the table that plan builds reaches attend through the state."""
    step, request_map = mapped()
    cache = torch.randn(24, 16, R + P, generator=torch.Generator().manual_seed(0))
    mla = PagedMla(step.config, "cpu")

    def attend():
        mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, request_map, num_tokens=3))
        return mla.attend(step.q_nope, step.q_pe, cache)

    eager = [tensor.clone() for tensor in attend()]
    for mine, theirs in zip(
        torch.compile(attend, fullgraph=True, backend="aot_eager")(), eager, strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["positions", "slot_mapping", "cu_seqlens_k", "block_table"])
def test_what_a_compiled_plan_leaves_is_read_behind_it(name):
    """S-1, S-3: not what was there before; with a table that plan builds."""
    step, request_map = mapped()

    def planned(mla):
        mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, request_map, num_tokens=3))
        return getattr(mla, name)

    eager = planned(PagedMla(step.config, "cpu"))
    compiled = torch.compile(planned, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(PagedMla(step.config, "cpu")), eager)


def test_slots_of_a_compiled_plan_may_be_handed_back():
    """S-10: as a graph that appends what it chose itself does."""
    step = build((40, 3), (17, 1))
    latents = torch.randn(4, R + P, generator=torch.Generator().manual_seed(0))
    mla = PagedMla(step.config, "cpu")

    def appended(cache):
        mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
        mla.append(latents[:, :R], latents[:, R:], cache, mla.slot_mapping)
        return cache

    expected = appended(step.cache.clone())
    found = torch.compile(appended, fullgraph=True, backend="aot_eager")(step.cache.clone())
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_queries_are_quantized_inside():
    """S-11, S-12: rotated by the positions that the graph planned."""
    step = build((40, 3), (17, 1), rope=Rope(RopePairing.NEOX), cache_format="fp8_e4m3")
    mla = PagedMla(step.config, "cpu")

    def quantized():
        mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
        codes, scales = mla.quantize_queries(step.q_nope, step.q_pe)
        return codes.view(torch.uint8), scales

    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(compiled(), quantized(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_not_compiled_follows_a_compiled_plan():
    """S-17: kernels and slots are those of the step that was planned, not of the one before."""
    step = build((40, 30), (17, 1), num_heads=16)
    decode = build((40, 1), (17, 1), num_heads=16)
    mla = PagedMla(step.config, "cpu")
    latents = torch.randn(31, R + P, generator=torch.Generator().manual_seed(0))
    expected_cache, cache = step.cache.clone(), step.cache.clone()
    plan = torch.compile(PagedMla.plan, fullgraph=True, backend="aot_eager")
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    mla.plan(MlaStep(*lengths, num_tokens=31))
    mla.append(latents[:, :R], latents[:, R:], expected_cache)
    expected = mla.attend(step.q_nope, step.q_pe, step.cache)
    mla.plan(MlaStep(decode.cu_seqlens_q, decode.seq_lens, decode.block_table, num_tokens=2))
    plan(mla, MlaStep(*lengths, num_tokens=31))
    mla.append(latents[:, :R], latents[:, R:], cache)
    found = mla.attend(step.q_nope, step.q_pe, step.cache)
    assert torch.equal(cache.view(torch.int32), expected_cache.view(torch.int32))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("call", ["append", "attend"])
def test_a_compiled_step_takes_as_many_tokens_as_were_planned(call):
    """Bad input: the plan's tokens reach the ops, so tensors of more are refused there too."""
    step = build((40, 2), (17, 1))
    mla = PagedMla(step.config, "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=3))
    latents = torch.zeros(3, R + P)
    before = step.cache.clone()

    def too_many():
        mla.plan(
            MlaStep(step.cu_seqlens_q[:2], step.seq_lens[:1], step.block_table[:1], num_tokens=2)
        )
        if call == "append":
            mla.append(latents[:, :R], latents[:, R:], step.cache)
            return step.cache
        return mla.attend(step.q_nope, step.q_pe, step.cache)

    name = {"append": "ckv", "attend": "q_nope"}[call]
    with pytest.raises(InvalidArgument, match=name):
        torch.compile(too_many, backend="aot_eager")()
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


def test_steps_of_other_sizes_recompile_at_most_once():
    """S-17: planned sizes reach a compiled layer as numbers that may change."""
    step = build((40, 2), (17, 1), (30, 3), (3, 1))
    mla = PagedMla(step.config, "cpu")
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def layer(q_nope, q_pe):
        return mla.attend(q_nope, q_pe, step.cache)[0]

    for rows in (1, 2, 3, 4):
        tokens = int(step.cu_seqlens_q[rows])
        starts, lens = step.cu_seqlens_q[: rows + 1], step.seq_lens[:rows]
        mla.plan(MlaStep(starts, lens, step.block_table[:rows], num_tokens=tokens))
        queries = step.q_nope[:tokens], step.q_pe[:tokens]
        assert torch.equal(layer(*queries), mla.attend(*queries, step.cache)[0])
    assert counter.frame_count <= 2


def test_plans_of_other_sizes_recompile_at_most_once():
    """S-17: neither does the longest query that the host knows cause another graph."""
    rows = ((40, 2), (17, 3), (30, 4), (9, 5), (60, 6), (20, 7))
    step = build(*rows, num_heads=16)
    mla = PagedMla(step.config, "cpu")
    counter = CompileCounterWithBackend("aot_eager")

    def whole(starts, lens, table, queries, longest):
        mla.plan(MlaStep(starts, lens, table, num_tokens=len(queries[0]), max_query_len=longest))
        return mla.attend(*queries, step.cache)[0]

    compiled = torch.compile(whole, backend=counter, fullgraph=True)
    for count in range(2, len(rows) + 1):
        tokens = int(step.cu_seqlens_q[count])
        lengths = step.cu_seqlens_q[: count + 1], step.seq_lens[:count], step.block_table[:count]
        given = (*lengths, (step.q_nope[:tokens], step.q_pe[:tokens]), count + 1)
        assert torch.equal(compiled(*given), whole(*given))
    assert counter.frame_count <= 2


def test_merged_outputs_are_dense():
    """S-8: a compiler gets the strides of the outputs, for any strides of the partial results."""
    outs = torch.randn(4, 2, 3, R).permute(1, 2, 0, 3)
    lses = torch.randn(4, 2, 3).permute(1, 2, 0)
    torch.library.opcheck(merge, (outs, lses), test_utils="test_faketensor")
    with FakeTensorMode() as mode:
        answer = merge(mode.from_tensor(outs), mode.from_tensor(lses))
    assert all(tensor.is_contiguous() for tensor in answer)


def test_a_compiled_merge_is_the_eager_one():
    """S-8: it is one op of a compiled function."""
    outs, lses = torch.randn(4, 2, 3, R), torch.randn(4, 2, 3)
    compiled = torch.compile(merge_partials, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(outs, lses), merge_partials(outs, lses)))


@pytest.mark.parametrize("name", ["plan", "append", "attend", "merge"])
def test_schemas_declare_what_is_written(name):
    """S-9, S-10: every op passes torch's own check of schema and fake implementation."""
    step = build((20, 2), (9, 1))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    state, handle = mla._core.plan.state, mla._handle
    out, lse = torch.empty_like(step.q_nope), torch.empty(3, 4)
    arguments = {
        "plan": (
            (state, step.cu_seqlens_q, step.seq_lens, step.block_table, None, None),
            {"num_tokens": 3, "max_query_len": None, "handle": handle},
        ),
        "append": (
            (state, torch.ones(3, R), torch.ones(3, P), step.cache, None, None),
            {"num_tokens": 3, "handle": handle},
        ),
        "attend": (
            (state, step.q_nope, step.q_pe, out, lse, step.cache, None, step.block_table),
            {"num_rows": 2, "num_tokens": 3, "max_query_len": None, "handle": handle},
        ),
        "merge": ((torch.randn(2, 3, 4, R), torch.randn(2, 3, 4)), {}),
    }
    checks = ("test_schema", "test_faketensor")
    op = merge if name == "merge" else getattr(ops, name)
    torch.library.opcheck(op, *arguments[name], test_utils=checks)


def test_a_layer_stays_outside():
    """S-17: it has no ops, and the compiler raises an error instead of tracing its launches."""
    step = build((20, 2), (9, 1))
    layer = MlaLayer(LayerConfig(attention=step.config, qk_nope_head_dim=16, v_head_dim=16), "cpu")
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer.plan, fullgraph=True, backend="aot_eager")(
            MlaStep(*lengths, num_tokens=3)
        )
