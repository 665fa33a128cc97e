"""Small steps that misuse a call, with every address of a kernel held against its tensors.

``optimized/tests_misuse`` searches for such steps; what it finds, and is small, is kept here.
"""

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from mla_step import P, R, config

from paged_mla_optimized import PagedMla, RequestMap
from paged_mla_optimized.tensors.step import MlaStep

sys.path.append(str(Path(__file__).parents[1] / "tests_misuse"))

from accesses import OutOfBounds, checked_accesses

I32 = torch.int32
HEADS, BLOCKS, SIZE = 4, 10, 4


@triton.jit
def copy_kernel(source_ptr, target_ptr, source_at, target_at, count, N: tl.constexpr):
    lane = tl.arange(0, N)
    values = tl.load(source_ptr + source_at + lane, mask=lane < count)
    tl.store(target_ptr + target_at + lane, values, mask=lane < count)


@pytest.mark.parametrize(
    ("source_at", "target_at", "count", "message"),
    [
        (-1, 0, 1, "copy_kernel reads 4 bytes outside its tensors, 4 bytes in front of source_ptr"),
        (6, 0, 2, "reads 4 bytes .*, 0 bytes behind the end of source_ptr"),
        (2, 0, 3, "reads 4 bytes .*, in a gap of source_ptr"),
        (0, -2, 1, "writes 4 bytes .*, 8 bytes in front of target_ptr"),
        (0, 7, 2, "writes 4 bytes .*, 0 bytes behind the end of target_ptr"),
    ],
)
def test_an_address_outside_a_tensor_is_found(source_at, target_at, count, message):
    """It ends the launch with the kernel's name, though it lies in the memory around the tensor."""
    source = torch.zeros(32, dtype=I32)[8:].as_strided((2, 3), (4, 1))  # element 3 is a gap
    target = torch.zeros(32, dtype=I32)[8:16]
    with pytest.raises(OutOfBounds, match=message), checked_accesses():
        copy_kernel[(1,)](source, target, source_at, target_at, count, N=8)


def test_addresses_inside_tensors_are_followed():
    """Of masked lanes none counts."""
    source, target = torch.arange(4, dtype=I32), torch.zeros(8, dtype=I32)
    with checked_accesses() as launched:
        copy_kernel[(1,)](source, target, 1, 5, 3, N=8)
    assert launched == ["copy_kernel"]
    assert target.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]


def ask(
    cu_seqlens_q: list[int],
    seq_lens: list[int],
    table: list[list[int]] | RequestMap,
    *,
    num_tokens: int,
    tree: torch.Tensor | None = None,
    **changes: object,
) -> tuple[PagedMla, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plan, append ones to a cache of sevens, and attend; return the cache, out and lse too."""
    torch.manual_seed(0)
    mla = PagedMla(config(block_size=SIZE, max_model_len=64, **changes), "cpu")
    cache = torch.full((BLOCKS, SIZE, R + P), 7.0)
    if isinstance(table, list):
        table = torch.tensor(table, dtype=I32).view(len(seq_lens), -1)
    lengths = (torch.tensor(numbers, dtype=I32) for numbers in (cu_seqlens_q, seq_lens))
    with checked_accesses():
        mla.plan(MlaStep(*lengths, table, num_tokens=num_tokens, mask=tree))
        mla.append(torch.ones(num_tokens, R), torch.ones(num_tokens, P), cache)
        out, lse = mla.attend(
            torch.randn(num_tokens, HEADS, R), torch.randn(num_tokens, HEADS, P), cache
        )
    return mla, cache, out, lse


def written(cache: torch.Tensor) -> list[int]:
    """Return the slots that have ones."""
    return (cache == 1).all(-1).flatten().nonzero().flatten().tolist()


def test_fewer_keys_than_queries_touch_no_other_request():
    """S-2: the second row has 4 queries and 2 keys; blocks 6 and 7 are the first row's."""
    _, cache, out, lse = ask([0, 1, 5], [6, 2], [[6, 7], [8, -1]], num_tokens=5)
    assert written(cache) == [7 * SIZE + 1]
    assert (out[1:] == 0).all()
    assert (lse[1:] == -torch.inf).all()


def test_prefix_sums_below_0_write_nothing_in_front_of_the_answers():
    """S-2: the first row begins at -3; out and lse are ends of larger tensors elsewhere."""
    _, cache, out, lse = ask([-3, 2, 4], [6, 7], [[1, 2], [3, 4]], num_tokens=5)
    assert written(cache) == [4 * SIZE + 1, 4 * SIZE + 2]
    padded = [0, 1, 4]
    assert (out[padded] == 0).all()
    assert (lse[padded] == -torch.inf).all()
    assert lse[2:4].isfinite().all()


@pytest.mark.parametrize(("size", "queries", "keys"), [(4, 2, 1), (4, 7, 5)])
def test_non_causal_rows_of_fewer_keys_than_queries(size, queries, keys):
    """S-2, S-4: every query sees all keys, of which the last are the last queries' own."""
    changes = {"mask": "non_causal", "num_tokens": queries}
    mla, cache, _, lse = ask([0, queries], [keys], [[3, 5]], **changes)
    slots = [(3, 5)[key // size] * size + key % size for key in range(keys)]
    assert written(cache) == slots
    assert mla.slot_mapping.tolist() == [-1] * (queries - keys) + slots
    assert lse.isfinite().all()


@pytest.mark.parametrize("table", [[[]], [[3]]], ids=["no column", "one"])
def test_tables_without_the_columns_that_rows_need(table):
    """S-1: the row is padding."""
    mla, cache, out, _ = ask([0, 4], [6], table, num_tokens=4)
    assert written(cache) == []
    assert mla.slot_mapping.tolist() == [-1] * 4
    assert (out == 0).all()


@pytest.mark.parametrize("elements", [0, 3, 8])
def test_tree_masks_that_are_shorter_than_their_rows(elements):
    """S-14: a row whose elements the mask does not hold is padding."""
    tree = torch.ones(elements, dtype=torch.bool)
    changes = {"mask": "tree:qlen", "max_draft_tokens": 3, "num_tokens": 5}
    _, cache, out, _ = ask([0, 2, 5], [2, 3], [[1], [2]], tree=tree, **changes)
    assert written(cache) == ([] if elements < 4 else [4, 5])
    assert (out[2:] == 0).all()


def test_requests_past_the_map_beside_one_that_is_known():
    """S-1: the map has two requests; the second row asks for the third."""
    slots = torch.arange(16, dtype=I32).view(2, 8)
    ids = torch.tensor([1, 2], dtype=I32)
    _, cache, _, lse = ask(
        [0, 1, 2], [5, 5], RequestMap(slots, ids), num_tokens=2, table_multiple=1
    )
    assert written(cache) == [12]
    assert lse[0].isfinite().all()
    assert (lse[1] == -torch.inf).all()
