"""Conventions of other engines, as parameters: base-2 lse, reserved slots, fill, request maps."""

import math

import pytest
import torch
from mla_step import P, R, assert_close, build, config, dense

from paged_mla_optimized import MlaConfig, PagedMla, RequestMap
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

I32 = torch.int32


def test_lse_in_base_2():
    """S-7: only the unit of lse changes; a query that sees nothing keeps -inf."""
    step = build((90, 3), (0, 1), (17, 1), lse_base="2")
    out, lse = dense(step)
    assert_close(step.attend(), (out, lse / math.log(2)))


def test_reserved_slot_is_never_written():
    """S-10: slot 0 stays as it is when an engine reserves it, as negative slots do."""
    cfg = config(reserved_slot=0)
    mla = PagedMla(cfg, "cpu")
    mla.plan(
        MlaStep(
            torch.tensor([0, 1, 2], dtype=I32),
            torch.tensor([1, 1], dtype=I32),
            torch.tensor([[0], [1]], dtype=I32),
            num_tokens=2,
        )
    )
    assert mla.slot_mapping.tolist() == [0, 16]
    cache = torch.full((2, 16, R + P), 7.0)
    mla.append(torch.ones(2, R), torch.ones(2, P), cache)
    assert (cache[0] == 7).all()
    assert (cache[1, 0] == 1).all()


def test_padded_rows_of_length_one_are_harmless():
    """S-9: a row filled up with length 1 and block 0 reads the finite reserved slot only."""
    real = build((40, 1), reserved_slot=0)
    cache = torch.cat([torch.zeros(1, 16, R + P), real.cache])
    table = torch.zeros(3, real.block_table.shape[1], dtype=I32)
    table[0] = real.block_table[0] + 1
    mla = PagedMla(real.config, "cpu")
    mla.plan(
        MlaStep(
            torch.arange(4, dtype=I32), torch.tensor([40, 1, 1], dtype=I32), table, num_tokens=3
        )
    )
    queries = [torch.cat([q, torch.ones(2, *q.shape[1:])]) for q in (real.q_nope, real.q_pe)]
    out, lse = mla.attend(*queries, cache)
    assert_close((out[:1], lse[:1]), dense(real))
    assert not out[1:].any()
    assert lse[1:].isfinite().all()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_table_from_a_request_map(ids):
    """S-1, S-9: first slot of each block, a fill past the row, a width that is a multiple."""
    cfg = config(block_size=4, max_model_len=40, table_multiple=8, table_fill=-1)
    req_to_token = torch.full((5, 40), 2**31 - 1, dtype=I32)
    req_to_token[3, :6] = torch.tensor([28, 29, 30, 31, 8, 9])
    req_to_token[1, :9] = torch.tensor([20, 21, 22, 23, 0, 1, 2, 3, 4])
    request_map = RequestMap(req_to_token, torch.tensor([3, 1, 2**30], dtype=ids))
    mla = PagedMla(cfg, "cpu")
    lens = torch.tensor([6, 9, 0], dtype=I32)
    mla.plan(MlaStep(torch.tensor([0, 3, 4, 6], dtype=I32), lens, request_map, num_tokens=7))
    assert mla.block_table.tolist() == [
        [7, 2, *[-1] * 14],
        [5, 0, 1, *[-1] * 13],
        [-1] * 16,
    ]
    assert mla.slot_mapping.tolist() == [31, 8, 9, 4, -1, -1, -1]


def test_step_from_a_request_map():
    """S-1: a step planned from slots has the bits of one planned from blocks."""
    step = build((70, 3), (33, 1))
    expected = step.attend()
    slots = torch.zeros(2, 256, dtype=I32)
    for row, (seq_len, _) in enumerate(step.rows):
        key = torch.arange(seq_len)
        slots[row, :seq_len] = (step.block_table[row, key // 16] * 16 + key % 16).int()
    mla = PagedMla(config(table_multiple=1), "cpu")
    request_map = RequestMap(slots.flip(0), torch.tensor([1, 0]))
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, request_map, num_tokens=4))
    for mine, theirs in zip(mla.attend(step.q_nope, step.q_pe, step.cache), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_map_needs_a_config_that_builds_tables():
    """S-1: tables are only allocated if the config requires them."""
    request_map = RequestMap(torch.zeros(1, 8, dtype=I32), torch.zeros(1, dtype=I32))
    cu, lens = torch.tensor([0, 1], dtype=I32), torch.tensor([1], dtype=I32)
    with pytest.raises(InvalidArgument, match="block_table"):
        PagedMla(config(), "cpu").plan(MlaStep(cu, lens, request_map, num_tokens=1))
    wrong = RequestMap(request_map.req_to_token, torch.zeros(2, dtype=I32))
    with pytest.raises(InvalidArgument, match="request_ids"):
        PagedMla(config(table_multiple=1), "cpu").plan(MlaStep(cu, lens, wrong, num_tokens=1))


@pytest.mark.parametrize(
    ("name", "value"), [("lse_base", "10"), ("reserved_slot", -1), ("table_multiple", -8)]
)
def test_conventions_are_checked(name, value):
    """An unknown convention is an error at construction."""
    with pytest.raises(InvalidArgument, match=name):
        MlaConfig(**{**vars(config()), name: value})


@pytest.mark.parametrize("kind", ["requires_grad", "inference"])
def test_a_base_2_lse_of_any_kind(kind):
    """S-7: one that requires gradients, or was made in inference mode."""
    step = build((20, 3), (33, 1), lse_base="2")
    mla = PagedMla(step.config, "cpu")
    expected = step.attend(mla)[1]
    with torch.inference_mode(kind == "inference"):
        lse = torch.zeros(expected.shape, requires_grad=kind == "requires_grad")
    mla.attend(step.q_nope, step.q_pe, step.cache, lse=lse)
    assert torch.equal(lse, expected)
