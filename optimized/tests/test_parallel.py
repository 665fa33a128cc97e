"""Ranks of a group: their heads and tokens, and that their outputs are those of one instance."""

import multiprocessing

import parallel_ranks
import pytest
import torch
import torch.distributed as dist
from mla_step import P, R, config
from torch.multiprocessing import start_processes

from paged_mla_optimized import HeadWeights
from paged_mla_optimized.operations.shard.launch import Shard
from paged_mla_optimized.parallel import ContextParallelMla, heads_of_rank, link_bytes, local_len
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing

I32 = torch.int32


def test_ranks_have_the_outputs_of_one_instance(tmp_path):
    """S-6, S-8, S-18: decode, chain and chunk over 2 and 3 ranks, odd heads, ranks without keys."""
    imported_once = ["torch.distributed", "paged_mla_optimized.parallel"]
    multiprocessing.set_forkserver_preload(imported_once)
    world = max(situation.world for situation in parallel_ranks.SITUATIONS)
    arguments = (str(tmp_path / "store"), world)
    start_processes(parallel_ranks.run, arguments, nprocs=world, start_method="forkserver")


@pytest.mark.parametrize(
    ("num_heads", "counts"), [(16, [8, 8]), (5, [2, 2, 1]), (128, [19, 19, 18, 18, 18, 18, 18])]
)
def test_heads_of_ranks(num_heads, counts):
    """Neighbours, each head once, the first ranks one more."""
    ranks = [heads_of_rank(num_heads, len(counts), rank) for rank in range(len(counts))]
    assert [len(heads) for heads in ranks] == counts
    assert [head for heads in ranks for head in heads] == list(range(num_heads))


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("world", (4, 0, 0)),
        ("world", (4, 2.0, 0)),
        ("world", (4, True, 0)),
        ("rank", (4, 2, 2)),
        ("rank", (4, 2, 0.5)),
        ("rank", (4, 2, False)),
        ("num_heads", (2, 3, 0)),
        ("num_heads", (4.0, 2, 0)),
    ],
)
def test_ranks_that_cannot_be(argument, given):
    """Refused by name."""
    with pytest.raises(InvalidArgument) as error:
        heads_of_rank(*given)
    assert error.value.argument == argument


def test_weights_of_a_rank():
    """S-21: a rank's heads absorb, project and materialize as those of the whole do."""
    kv_b_proj = torch.randn(5 * (6 + 3), R)
    whole = HeadWeights.of_kv_b_proj(kv_b_proj, 5, 6)
    queries, latents = torch.randn(4, 5, 6), torch.randn(4, 5, R)
    values, made = torch.empty(4, 5, 3), torch.empty(4, 5 * 9)
    whole.project(latents, out=values)
    whole.materialize(latents[:, 0], made)
    for rank in range(2):
        heads = heads_of_rank(5, 2, rank)
        mine, part = whole.of_heads(heads), slice(heads.start, heads.stop)
        assert mine.w_uk.data_ptr() == whole.w_uk[heads.start].data_ptr()
        found = torch.empty(4, len(heads), 3)
        mine.project(latents[:, part], out=found)
        torch.testing.assert_close(found, values[:, part])
        torch.testing.assert_close(mine.absorb(queries[:, part]), whole.absorb(queries)[:, part])
        found = torch.empty(4, len(heads) * 9)
        mine.materialize(latents[:, 0], found)
        torch.testing.assert_close(found, made.view(4, 5, 9)[:, part].flatten(1))
    for heads in (range(3, 6), range(2, 2), range(0, 4, 2)):
        with pytest.raises(InvalidArgument, match="heads"):
            whole.of_heads(heads)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 16), (3, 4)])
def test_every_length_on_every_rank(world, interleave):
    """S-1, S-3, S-18: lengths, slots and tables of a chunk behind a context, by owners."""
    lens, query_len, block_size = (3, 120), 50, 16
    cfg = config(block_size=block_size, max_query_tokens=70, max_rows=4)
    table = torch.tensor([[-1] * 9, [-1] * 9, range(40, 49)], dtype=I32)
    table[0, 0] = 7
    starts = torch.tensor([0, 3, 3, 3 + query_len], dtype=I32)
    seq_lens = torch.tensor([lens[0], 0, lens[1]], dtype=I32)
    everywhere = torch.zeros(3 + query_len, dtype=I32)
    for rank in range(world):
        step = Shard(
            cfg, world=world, rank=rank, interleave=interleave, table_width=9, device=table.device
        )
        step.launch(starts, seq_lens, table, 3 + query_len + 1)
        owned = [p for p in range(120) if p // interleave % world == rank]
        token = 0
        for row, (seq_len, queries) in ((0, (3, 3)), (2, (120, query_len))):
            for position in range(seq_len - queries, seq_len):
                seen = [p for p in owned if p <= position]
                assert step.positions[token] == position
                assert step.local_lens[token] == len(seen)
                assert len(seen) == local_len(
                    position + 1, world=world, rank=rank, interleave=interleave
                )
                blocks = -(-len(seen) // block_size)
                assert torch.equal(step.block_table[token, :blocks], table[row, :blocks])
                slot = -1
                if position in owned:
                    block, offset = divmod(seen.index(position), block_size)
                    slot = int(table[row, block]) * block_size + offset
                    everywhere[token] += 1
                assert step.slot_mapping[token] == slot
                token += 1
        padding = (step.local_lens[token], step.positions[token], step.slot_mapping[token])
        assert padding == (0, 0, -1)
    assert (everywhere == 1).all()


def test_link_traffic():
    """S-18: each other rank gets 576 numbers of a query and 528 of an output line, 2 bytes each."""
    step = config(
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        cache_format="bf16",
    )
    assert link_bytes(step, 2, 64) == 64 * 8 * (576 + 528) * 2
    assert link_bytes(step, 3, 1) == 2 * 6 * (576 + 528) * 2
    assert link_bytes(step, 1, 64) == 0
    for name, given in (("num_tokens", (step, 2, -1)), ("config", (None, 2, 64))):
        with pytest.raises(InvalidArgument, match=name):
            link_bytes(*given)


@pytest.mark.usefixtures("group_of_one")
def test_what_a_rank_refuses():
    """S-18: the argument is named before anything is sent."""
    tree = {"mask": "tree:qlen", "max_draft_tokens": 4}
    for argument, changes, interleave in (
        ("mask", tree, 1),
        ("mask", {"mask": "non_causal"}, 1),
        ("rope", {"rope": Rope(RopePairing.NEOX)}, 1),
        ("table_multiple", {"table_multiple": 1}, 1),
        ("interleave", {}, 0),
        ("interleave", {}, 3),
        ("interleave", {}, 1.0),
    ):
        with pytest.raises(InvalidArgument) as error:
            ContextParallelMla(config(**changes), device="cpu", interleave=interleave)
        assert error.value.argument == argument
    for group in (dist.GroupMember.NON_GROUP_MEMBER, "world"):
        with pytest.raises(InvalidArgument, match=r"^group: got a \w+; allowed: a ProcessGroup$"):
            ContextParallelMla(config(), group, "cpu")
    mla = ContextParallelMla(config(), device="cpu")
    starts, lens = torch.tensor([0, 1], dtype=I32), torch.tensor([1], dtype=I32)
    with pytest.raises(InvalidArgument, match=r"num_tokens: got 65; .*max_query_tokens = 64"):
        mla.plan(MlaStep(starts, lens, lens[None], num_tokens=65))
    with pytest.raises(InvalidArgument, match="seq_lens"):
        mla.plan(MlaStep(starts, lens.long(), lens[None], num_tokens=1))
    mla.plan(MlaStep(starts, lens, lens[None], num_tokens=1))
    q_nope, q_pe, cache = torch.ones(1, 4, R), torch.ones(1, 4, P), torch.ones(2, 16, R + P)
    for argument, tensors, outputs in (
        ("q_nope", (q_nope[:, :3], q_pe, cache), {}),
        ("q_pe", (q_nope, q_nope, cache), {}),
        ("cache", (q_nope, q_pe, cache[:, :8]), {}),
        ("out", (q_nope, q_pe, cache), {"out": q_nope.half()}),
        ("lse", (q_nope, q_pe, cache), {"lse": torch.ones(1, 5)}),
    ):
        with pytest.raises(InvalidArgument) as error:
            mla.attend(*tensors, **outputs)
        assert error.value.argument == argument
    out = torch.ones(1, 4, R)
    for message, tensors, outputs in (
        ("out: got memory that overlaps q_nope", (q_nope, q_pe, cache), {"out": q_nope}),
        ("lse: got memory that overlaps q_pe", (q_nope, q_pe, cache), {"lse": q_pe[..., 0]}),
        ("out: got memory that overlaps cache", (q_nope, q_pe, cache), {"out": cache[:1, :4, :R]}),
        (
            "out: got memory that overlaps lse",
            (q_nope, q_pe, cache),
            {"out": out, "lse": out[..., 0]},
        ),
    ):
        with pytest.raises(InvalidArgument, match=message):
            mla.attend(*tensors, **outputs)
    with pytest.raises(InvalidArgument, match="local_lens: got memory that overlaps seq_lens"):
        mla.plan(MlaStep(starts, mla.local_lens, lens[None], num_tokens=1))


@pytest.mark.usefixtures("group_of_one")
def test_a_step_leaves_no_gradient_behind():
    """S-18: buffers that remembered where queries came from would hold every step's memory."""
    mla = ContextParallelMla(config(), device="cpu")
    one = torch.ones(1, dtype=I32)
    mla.plan(MlaStep(torch.tensor([0, 1], dtype=I32), one, one[None], num_tokens=1))
    queries = torch.ones(1, 4, R + P, requires_grad=True)
    answer = mla.attend(queries[..., :R], queries[..., R:], torch.ones(2, 16, R + P))
    held = [*answer, *vars(mla._exchange).values()]
    assert not [x for x in held if isinstance(x, torch.Tensor) and x.requires_grad]


@pytest.mark.usefixtures("group_of_one")
def test_a_warm_rank_has_touched_nothing():
    """S-6: what warms it is padding."""
    mla = ContextParallelMla(config(), device="cpu")
    cache = torch.full((2, 16, R + P), torch.nan)
    before = cache.clone()
    mla.warm_up(cache)
    assert torch.equal(cache.view(I32), before.view(I32))


def test_no_group():
    """S-18: the error names the group if torch.distributed is not initialized."""
    with pytest.raises(InvalidArgument, match="group"):
        ContextParallelMla(config(), device="cpu")


@pytest.mark.parametrize(
    ("argument", "shares"),
    [
        ("seq_len", {"seq_len": -1, "world": 2, "rank": 0}),
        ("world", {"seq_len": 10, "world": 0, "rank": 0}),
        ("rank", {"seq_len": 10, "world": 2, "rank": 5}),
        ("rank", {"seq_len": 10, "world": 2, "rank": -1}),
        ("rank", {"seq_len": 10, "world": 2, "rank": 0.0}),
        ("world", {"seq_len": 10, "world": 2.0, "rank": 0}),
        ("seq_len", {"seq_len": 10.5, "world": 2, "rank": 0}),
        ("interleave", {"seq_len": 10, "world": 2, "rank": 0, "interleave": 0}),
        ("interleave", {"seq_len": 10, "world": 2, "rank": 0, "interleave": 1.0}),
    ],
)
def test_shares_of_no_rank(argument, shares):
    """S-18: counting for a rank that does not exist raises an error."""
    with pytest.raises(InvalidArgument) as error:
        local_len(**shares)
    assert error.value.argument == argument
