"""Paged scatter as e4m3 into groups of tokens that share a scale (rules S-10 to S-12).

A group's scale grows with what joins it, and the codes that it had are encoded again. So one
program writes all tokens of a group: that of the first among them, in the order of the step. Since
they tend to follow each other, the others find an earlier one soon.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.append_fp8 import load_tokens, store_tokens
from paged_mla_optimized.kernels.common.e4m3 import decode, encode
from paged_mla_optimized.kernels.common.scales import GROUPS, largest_of, scale_of


@triton.jit
def _load_slots(slot_mapping_ptr, stride_slots, begin, end, reserved_slot, SLOTS: tl.constexpr):
    """Load the slots of tokens from `begin` up to `end`; -1 where nothing is written."""
    token = begin + tl.arange(0, SLOTS)
    at = slot_mapping_ptr + token.to(tl.int64) * stride_slots
    slot = tl.load(at, mask=(token >= 0) & (token < end), other=-1)
    return token, tl.where(slot == reserved_slot, -1, slot)


@triton.jit
def _follows_a_mate(
    slot_mapping_ptr, stride_slots, mine, group_slot, size, reserved_slot, SLOTS: tl.constexpr,
):  # fmt: skip
    """Return whether a token before `mine` goes to its group; the nearest are looked at first."""
    found = mine < 0
    end = mine
    while (end > 0) & (found == 0):
        _, slot = _load_slots(
            slot_mapping_ptr, stride_slots, end - SLOTS, end, reserved_slot, SLOTS
        )
        mates = (slot >= group_slot) & (slot < group_slot + size)
        found = tl.max(mates.to(tl.int32), axis=0) > 0
        end -= SLOTS
    return found


@triton.jit
def _tokens_at(
    slot_mapping_ptr, stride_slots, mine, num_tokens, group_slot, size, place, reserved_slot,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Return which token from `mine` on goes to each place [PLACES] of a group; -1 for none."""
    wanted = group_slot + place
    found = tl.full(place.shape, -1, tl.int32)
    begin = mine
    while begin < num_tokens:
        token, slot = _load_slots(
            slot_mapping_ptr, stride_slots, begin, num_tokens, reserved_slot, SLOTS
        )
        mates = (slot >= group_slot) & (slot < group_slot + size)
        if tl.max(mates.to(tl.int32), axis=0) > 0:
            goes = (slot[None, :] == wanted[:, None]) & mates[None, :]
            found = tl.maximum(found, tl.max(tl.where(goes, token[None, :], -1), axis=1))
        begin += SLOTS
    return found


@triton.jit
def _encode_again(row_ptr, kept, old, scale, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    """Give codes of kept rows [PLACES, COLUMNS], which had the scale `old`, another one."""
    at = row_ptr[:, None] + tl.arange(0, COLUMNS)[None, :]
    value = decode(tl.load(at, mask=kept[:, None], other=0), tl.float32, NATIVE) * old
    tl.store(at, encode(tl.div_rn(value, scale), NATIVE), mask=kept[:, None])


@triton.jit(
    do_not_specialize=["num_tokens", "reserved_slot"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def append_groups_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # uint8 [num_blocks, block_size, R + P]
    scales_ptr,  # float32 [num_blocks, 1, GROUPS]
    slot_mapping_ptr,  # int64 [T], negative: write nothing
    positions_ptr,  # int64 [T]
    cos_ptr,
    sin_ptr,
    stride_ckv,
    stride_k_pe,
    stride_slots,
    stride_cache_block,
    stride_cache_token,
    stride_scales_block,
    num_tokens,
    block_size,
    reserved_slot,  # write nothing there either; -1 for none
    R: tl.constexpr,
    P: tl.constexpr,
    ROPE: tl.constexpr,
    PLACES: tl.constexpr,  # of a group, worked on together
    SLOTS: tl.constexpr,  # of the step, looked at together
    NATIVE: tl.constexpr,
):
    mine = tl.program_id(0)
    slot = tl.load(slot_mapping_ptr + mine.to(tl.int64) * stride_slots)
    if (slot < 0) | (slot == reserved_slot):
        return
    size = block_size // GROUPS
    group_slot = slot // size * size
    if _follows_a_mate(
        slot_mapping_ptr, stride_slots, mine, group_slot, size, reserved_slot, SLOTS
    ):
        return
    block, first_place = slot // block_size, group_slot % block_size
    cache_ptr += block * stride_cache_block + first_place * stride_cache_token
    scale_at = scales_ptr + block * stride_scales_block + first_place // size

    amax = 0.0
    lowest = size
    for begin in range(0, size, PLACES):
        place = begin + tl.arange(0, PLACES)
        token = _tokens_at(
            slot_mapping_ptr, stride_slots, mine, num_tokens, group_slot, size, place,
            reserved_slot, SLOTS,
        )  # fmt: skip
        ckv, first, second = load_tokens(
            ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe,
            token.to(tl.int64), token >= 0, R, P, ROPE,
        )  # fmt: skip
        first, second = first.to(tl.float32), second.to(tl.float32)
        found = tl.where(token >= 0, largest_of(ckv, first, second), 0.0)
        amax = tl.maximum(amax, tl.max(found, axis=0))
        lowest = tl.minimum(lowest, tl.min(tl.where(token >= 0, place, size), axis=0))

    scale = scale_of(amax)
    old = tl.load(scale_at)
    keeps = (lowest > 0) & (old > 0) & (old < float("inf"))
    if keeps:
        scale = tl.maximum(scale, old)
    if keeps & (scale > old):
        for begin in range(0, lowest, PLACES):
            place = begin + tl.arange(0, PLACES)
            row = cache_ptr + place.to(tl.int64) * stride_cache_token
            _encode_again(row, place < lowest, old, scale, R, NATIVE)
            _encode_again(row + R, place < lowest, old, scale, P, NATIVE)
    for begin in range(0, size, PLACES):
        place = begin + tl.arange(0, PLACES)
        token = _tokens_at(
            slot_mapping_ptr, stride_slots, mine, num_tokens, group_slot, size, place,
            reserved_slot, SLOTS,
        )  # fmt: skip
        ckv, first, second = load_tokens(
            ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe,
            token.to(tl.int64), token >= 0, R, P, ROPE,
        )  # fmt: skip
        first, second = first.to(tl.float32), second.to(tl.float32)
        row = cache_ptr + place.to(tl.int64) * stride_cache_token
        store_tokens(row, ckv, first, second, scale, token >= 0, R, P, ROPE, NATIVE)
    tl.store(scale_at, scale)
