import pytest
import torch
from mla_step import P, R, build

from paged_mla_optimized import PagedMla
from paged_mla_shared.errors import InvalidArgument


def planned(step):
    mla = PagedMla(step.config, "cpu")
    mla.plan(step.described)
    return mla


def test_rows_follow_each_other():
    """S-1, S-9: each row's keys in order, empty rows nothing, and no byte past the last key."""
    step = build((33, 1), (0, 0), (5, 5), (0, 1), (70, 2))
    mla = planned(step)
    ckv, k_pe = torch.full((120, R), 7.0), torch.full((120, P), 7.0)
    mla.gather_context(step.cache, ckv, k_pe)
    keys = torch.cat(step.keys)
    assert torch.equal(ckv[:108], keys[:, :R])
    assert torch.equal(k_pe[:108], keys[:, R:])
    assert (ckv[108:] == 7).all()
    assert (k_pe[108:] == 7).all()
    assert mla.cu_seqlens_k.tolist() == [0, 33, 33, 38, 38, 108]


def test_no_hit_and_no_table():
    """S-9: rows without tokens, and a table of width 0, are legal."""
    step = build((0, 1), (0, 0))
    step.block_table = step.block_table[:, :0]
    mla = planned(step)
    ckv, k_pe = torch.full((4, R), 7.0), torch.full((4, P), 7.0)
    mla.gather_context(step.cache, ckv, k_pe)
    assert (ckv == 7).all()
    assert (k_pe == 7).all()


def test_room_for_fewer_keys():
    """S-9: what does not fit is dropped, and nothing behind the room is written."""
    step = build((33, 1), (70, 2))
    ckv, k_pe = torch.full((64, R), 7.0), torch.full((64, P), 7.0)
    planned(step).gather_context(step.cache, ckv[:40], k_pe[:40])
    assert torch.equal(ckv[:40], torch.cat(step.keys)[:40, :R])
    assert (ckv[40:] == 7).all()


def test_fewer_keys_than_a_program_reads():
    """S-1: three keys of two rows, and room for more."""
    step = build((2, 1), (1, 1))
    ckv, k_pe = torch.full((4, R), 7.0), torch.full((4, P), 7.0)
    planned(step).gather_context(step.cache, ckv, k_pe)
    assert torch.equal(torch.cat([ckv, k_pe], dim=1)[:3], torch.cat(step.keys))
    assert (ckv[3:] == 7).all()


def test_more_keys_than_int32_counts():
    """S-1: the sums stay at the largest int32; what there is room for is as in any other step."""
    step = build((16, 0), (16, 0), (16, 0), max_model_len=2**30)
    step.block_table = step.block_table[:, :1].expand(3, 2**30 // 16)  # one block, over and over
    step.seq_lens[1:] = 2**30
    mla = planned(step)
    assert mla.cu_seqlens_k.tolist() == [0, 16, 16 + 2**30, 2**31 - 1]
    ckv, k_pe = torch.full((100, R), 7.0), torch.full((100, P), 7.0)
    mla.gather_context(step.cache, ckv, k_pe)
    keys = torch.cat([step.keys[0], *[step.keys[1]] * 6])[:100]
    assert torch.equal(torch.cat([ckv, k_pe], dim=1), keys)


def test_keys_of_no_block_are_zeros():
    """S-9: a block id outside the cache is used as no address; other keys are as ever."""
    step = build((40, 1), (20, 1))
    step.block_table[0, :2] = torch.tensor([-1, len(step.cache)])
    ckv, k_pe = torch.full((60, R), 7.0), torch.full((60, P), 7.0)
    planned(step).gather_context(step.cache, ckv, k_pe)
    found = torch.cat([ckv, k_pe], dim=1)
    assert (found[:32] == 0).all()
    assert torch.equal(found[32:], torch.cat([step.keys[0][32:], step.keys[1]]))


def test_no_room_for_more_lines_than_are_counted():
    """S-1: refused, since lines past the largest int32 would have no row."""
    lines = torch.zeros(1, R).expand(2**31, R), torch.zeros(1, P).expand(2**31, P)
    step = build((33, 1))
    with pytest.raises(InvalidArgument, match="ckv"):
        planned(step).gather_context(step.cache, *lines)


def test_where_to_write_is_two_dimensional():
    """S-1: a number, or a line, is refused by name."""
    step = build((20, 1))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    for ckv in (torch.tensor(1.0), torch.zeros(R)):
        with pytest.raises(InvalidArgument, match="ckv"):
            mla.gather_context(step.cache, ckv, torch.zeros(20, P))
    with pytest.raises(InvalidArgument, match="k_pe"):
        mla.gather_context(step.cache, torch.zeros(20, R), torch.zeros(19, P))


def test_what_is_refused_is_refused_after_what_passed():
    """S-1: a layout that was right is remembered, and no other."""
    step = build((20, 1))
    mla = planned(step)
    for _ in range(2):
        mla.gather_context(step.cache, torch.zeros(20, R), torch.zeros(20, P))
        with pytest.raises(InvalidArgument, match="k_pe"):
            mla.gather_context(step.cache, torch.zeros(20, R), torch.zeros(19, P))
        with pytest.raises(InvalidArgument, match="ckv: got strides"):
            mla.gather_context(step.cache, torch.zeros(1, R).expand(20, R), torch.zeros(20, P))
