import pytest
import torch
from mla_step import P, R, build, config

from paged_mla_optimized import PagedMla
from paged_mla_optimized.tensors.step import MlaStep

I32 = torch.int32


def plan(cfg, cu_seqlens_q, seq_lens, table, num_tokens, mask=None):
    mla = PagedMla(cfg, "cpu")
    mla.plan(
        MlaStep(
            torch.tensor(cu_seqlens_q, dtype=I32),
            torch.tensor(seq_lens, dtype=I32),
            torch.tensor(table, dtype=I32),
            num_tokens=num_tokens,
            mask=mask,
        )
    )
    return mla


def test_hand_computed_step():
    """S-1, S-2, S-3: a chunk over a block edge, a decode, a padded row and a padded token."""
    mla = plan(
        config(block_size=4), [0, 3, 4, 6], [6, 9, 0], [[7, 2, -1], [5, 0, 1], [-1, -1, -1]], 7
    )
    assert mla.positions.tolist() == [3, 4, 5, 8, 0, 0, 0]
    assert mla.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 1 * 4, -1, -1, -1]
    assert mla.positions.dtype is torch.int64
    assert mla.slot_mapping.dtype is torch.int64


def test_slots_are_64_bit():
    """S-1: a block id times the block size may pass 2^31."""
    mla = plan(config(block_size=256, max_model_len=512), [0, 1], [257], [[0, 2**24 + 3]], 1)
    assert mla.slot_mapping.tolist() == [(2**24 + 3) * 256]


TREE = [  # 0 is the root of 1 and 2; 3 hangs on 2
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [1, 0, 1, 0],
    [1, 0, 1, 1],
]


def spelled(spelling):
    """Return `TREE` after a row of one draft (5 tokens of context each) in a spelling."""
    tree = torch.tensor(TREE, dtype=torch.bool)
    one = torch.ones(1, 1, dtype=torch.bool)
    if spelling == "tree:qlen":
        return torch.cat([one.ravel(), tree.ravel()])
    if spelling == "tree:full":
        rows = [torch.cat([torch.ones(len(m), 5, dtype=torch.bool), m], 1) for m in (one, tree)]
        return torch.cat([row.ravel() for row in rows])
    junk = 0b11110000  # bits past a row's drafts mean nothing
    lines = [0b1 | junk, *(sum(bit << j for j, bit in enumerate(line)) | junk for line in TREE)]
    return torch.tensor([[line, 255] for line in lines], dtype=torch.uint8)


@pytest.mark.parametrize("spelling", ["tree:qlen", "tree:full", "tree:packed"])
def test_positions_follow_depth_slots_follow_index(spelling):
    """S-3, S-14: siblings share a position, never a slot, in every spelling."""
    cfg = config(block_size=4, mask=spelling, max_draft_tokens=4)
    mla = plan(cfg, [0, 1, 5], [6, 9], [[0, 1, -1], [2, 3, 4]], 5, spelled(spelling))
    assert mla.positions.tolist() == [5, 5, 6, 6, 7]
    assert mla.slot_mapping.tolist() == [1 * 4 + 1, 3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 4 * 4]


def test_strided_lengths_and_table():
    """S-1: lengths and tables are taken by their strides."""
    step = build((20, 3), (40, 2))
    dense = PagedMla(step.config, "cpu")
    step.attend(dense)
    strided = PagedMla(step.config, "cpu")
    wide = torch.full((2, 9), -1, dtype=I32)
    wide[:, : 2 * step.block_table.shape[1] : 2] = step.block_table
    strided.plan(
        MlaStep(
            step.cu_seqlens_q.repeat_interleave(2)[::2],
            step.seq_lens.repeat_interleave(3)[::3],
            wide[:, : 2 * step.block_table.shape[1] : 2],
            num_tokens=5,
        )
    )
    assert torch.equal(strided.slot_mapping, dense.slot_mapping)
    assert torch.equal(strided.positions, dense.positions)


def test_many_rows():
    """S-1, S-3: prefix sums over as many rows as there may be."""
    lens = [1 + i % 4 for i in range(33)]
    cu_seqlens_q = [0, *torch.tensor(lens).cumsum(0).tolist()]
    cfg = config(max_rows=33, max_query_tokens=100)
    mla = plan(cfg, cu_seqlens_q, [10 + n for n in lens], [[b] for b in range(33)], sum(lens))
    expected = [10 + i for n in lens for i in range(n)]
    rows = [b for b, n in enumerate(lens) for _ in range(n)]
    assert mla.positions.tolist() == expected
    assert mla.slot_mapping.tolist() == [16 * b + p for b, p in zip(rows, expected, strict=True)]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free-splits", "fixed-splits"])
def test_what_memory_held_before_a_plan_means_nothing(batch_invariant):
    """S-9: engines that sleep give pages back, and wake to others with anything in them."""
    step = build((70, 3), (20, 1), (0, 0), padded_tokens=1, batch_invariant=batch_invariant)
    mla = PagedMla(step.config, "cpu")
    fresh = step.attend(mla)
    mla._core.plan.state.fill_(3)
    for mine, first in zip(step.attend(mla), fresh, strict=True):
        assert torch.equal(mine, first)
    ckv, k_pe = torch.full((90, R), torch.nan), torch.full((90, P), torch.nan)
    mla.gather_context(step.cache, ckv, k_pe)
    assert torch.equal(torch.cat([ckv, k_pe], 1), torch.cat(step.keys))


CUT = {
    "in-a-row": (((40, 5), (37, 5), (20, 3)), 8),
    "between-rows": (((40, 5), (37, 5)), 5),
    "all": (((40, 5), (0, 3)), 0),
    "empty-row": (((40, 2), (0, 5), (30, 1)), 4),
    "prompts": (((9, 9), (7, 7)), 12),
}


def kept(rows, num_tokens):
    """Return rows without the tokens at or past `num_tokens`."""
    for seq_len, query_len in rows:
        count = min(query_len, num_tokens)
        num_tokens -= count
        yield max(seq_len - (query_len - count), 0), count


@pytest.mark.parametrize("changes", [{}, {"batch_invariant": True}, {"mask": "non_causal"}])
@pytest.mark.parametrize(("rows", "num_tokens"), CUT.values(), ids=CUT.keys())
def test_tokens_past_the_step_are_cut_off(rows, num_tokens, changes):
    """S-17: rows longer than T are as if those tokens had not come; nothing past T is written."""
    step = build(*rows, **changes)
    mla = PagedMla(step.config, "cpu")
    outs, slots = [], []
    for lens in (rows, list(kept(rows, num_tokens))):
        query_lens = torch.tensor([0, *(count for _, count in lens)])
        out = torch.full((16, 4, R), 7.0)
        lse = torch.full((16, 4), 7.0)
        mla.plan(
            MlaStep(
                query_lens.cumsum(0).to(I32),
                torch.tensor([seq_len for seq_len, _ in lens], dtype=I32),
                step.block_table,
                num_tokens=num_tokens,
            )
        )
        queries = step.q_nope[:num_tokens], step.q_pe[:num_tokens]
        mla.attend(*queries, step.cache, out=out[:num_tokens], lse=lse[:num_tokens])
        assert (out[num_tokens:] == 7).all()
        assert (lse[num_tokens:] == 7).all()
        outs.append((out, lse))
        slots.append((mla.positions.clone(), mla.slot_mapping.clone(), mla.cu_seqlens_k.clone()))
    for mine, expected in zip([*outs[0], *slots[0]], [*outs[1], *slots[1]], strict=True):
        assert torch.equal(mine, expected)


def test_a_draft_tree_is_cut_off():
    """S-14, S-17: outputs of the truncated row have no meaning; nothing past T is written."""
    for spelling in ("tree:qlen", "tree:full", "tree:packed"):
        cfg = config(block_size=4, mask=spelling, max_draft_tokens=4)
        mask = spelled(spelling)
        mask = mask[:3] if spelling == "tree:packed" else mask
        mla = plan(cfg, [0, 1, 5], [6, 9], [[0, 1, -1], [2, 3, 4]], 3, mask)
        assert mla.slot_mapping.tolist() == [1 * 4 + 1, 3 * 4 + 1, 3 * 4 + 2]
        out, lse = torch.full((6, 4, R), 7.0), torch.full((6, 4), 7.0)
        cache = torch.randn(5, 4, R + P)
        mla.attend(torch.randn(3, 4, R), torch.randn(3, 4, P), cache, out=out[:3], lse=lse[:3])
        assert (out[3:] == 7).all()
        assert (lse[3:] == 7).all()


def test_tokens_in_front_of_the_first_row():
    """S-1, S-9: they have no row, so no table entry is read for them and no slot written."""
    mla = plan(config(block_size=4), [9, 9], [200], [[5, 6]], 3)
    assert mla.positions.tolist() == [0, 0, 0]
    assert mla.slot_mapping.tolist() == [-1, -1, -1]
