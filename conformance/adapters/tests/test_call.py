"""Tests of the arguments of a call: slots, page lists, parts and buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_mla_adapters.arrays import DTYPES, to_numpy
from paged_mla_adapters.call import AppendCall, Call
from paged_mla_adapters.declared import capabilities
from paged_mla_adapters.kernel import KernelBackend
from paged_mla_adapters.surroundings.margins import guards_of
from paged_mla_shared.cases import CASES
from paged_mla_shared.dims import SMALL
from paged_mla_shared.errors import InvalidArgument

RANK, ROPE = SMALL.kv_lora_rank, SMALL.qk_rope_head_dim
PROBLEM = replace(CASES["decode"][0].problem(SMALL, "float32"), block_size=4)


def call(cls=Call, **given):
    """Return a call of three rows with 6, 0 and 4 keys."""
    cache = torch.arange(5 * 4 * 2 * (RANK + ROPE)).float().view(5, 4, -1)[..., : RANK + ROPE]
    of_rows = {
        "q": torch.randn(6, 2, RANK + ROPE),
        "cu_seqlens_q": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "block_table": torch.tensor([[3, 1], [0, 0], [4, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([6, 0, 4], dtype=torch.int32),
    }
    room = guards_of(torch.device("cpu"))
    return cls(room=room, problem=PROBLEM, cache=cache, **(given or of_rows))


def test_slots_are_those_of_the_rows_blocks():
    """S-1: a slot is block * block_size + offset."""
    slots = call().slots
    assert slots.dtype is torch.int32
    assert slots[0].tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("page_size", "indptr", "indices", "last"),
    [
        (None, [0, 2, 2, 3], [3, 1, 4], [2, 0, 4]),
        (4, [0, 2, 2, 3], [3, 1, 4], [2, 0, 4]),
        (1, [0, 6, 6, 10], [12, 13, 14, 15, 4, 5, 16, 17, 18, 19], [1, 0, 1]),
    ],
)
def test_page_lists_are_of_blocks_or_of_slots(page_size, indptr, indices, last):
    """A row without keys has no pages."""
    lists = call().page_lists(page_size)
    found = (lists.indptr, lists.indices, lists.last_page_len)
    assert [part.tolist() for part in found] == [indptr, indices, last]
    assert {part.dtype for part in found} == {torch.int32}


def test_a_page_of_another_size_raises_an_error():
    """The error lists the allowed sizes."""
    with pytest.raises(InvalidArgument, match="page_size: got 2; allowed: 1 or the block size, 4"):
        call().page_lists(2)


def test_query_parts_are_two_contiguous_tensors():
    """Each access returns the same tensors."""
    given = call()
    q_nope, q_pe = given.query_parts
    assert torch.equal(torch.cat([q_nope, q_pe], -1), given.q)
    assert q_nope.is_contiguous()
    assert q_pe.is_contiguous()
    assert given.query_parts[0] is q_nope
    assert given.by_rows(q_nope).shape == (3, 2, 2, RANK)


def test_writes_to_parts_of_the_cache_change_the_cache():
    """The parts are copied after the call, and bytes between tokens do not change."""
    given = call(
        AppendCall,
        ckv=torch.zeros(1, RANK),
        k_pe=torch.zeros(1, ROPE),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
    )
    before = given.cache.clone()
    given.finish()
    assert torch.equal(given.cache, before)
    ckv_cache, kpe_cache = given.cache_parts
    assert torch.equal(torch.cat([ckv_cache, kpe_cache], -1), before)
    ckv_cache[2, 3] = -1
    assert torch.equal(given.cache, before)
    given.finish()
    assert (given.cache[2, 3, :RANK] == -1).all()
    assert torch.equal(given.cache[..., RANK:], before[..., RANK:])


def test_a_declared_merge_must_exist():
    """A backend that declares a merge without one raises an error at its creation."""
    served = capabilities(frozenset({"float32"}), head_dims=((32, 16),))
    served = replace(served, ops=served.ops | {"merge"})
    with pytest.raises(InvalidArgument, match="merge: got None"):
        KernelBackend("x", "0", lambda _: None, served)


def test_buffers_are_full_of_nan():
    """The buffers of all data types contain NaN."""
    given = call()
    out, lse = given.answers()
    assert out.shape == (6, 2, RANK)
    assert lse.shape == (6, 2)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert given.workspace(16).view(torch.float16).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_result_is_copied(dtype):
    """The array keeps its values when a later call changes the tensor."""
    tensor = torch.ones(2, dtype=dtype)
    array = to_numpy(tensor)
    tensor.zero_()
    assert (array == 1).all()
