"""Write the tokens of a step as e4m3 into scale groups, at any slots (rules S-10 to S-12).

A scale group is the BLOCK_SIZE / GROUPS tokens of a block that share one scale. Each program writes
TOKENS consecutive tokens of the step. The scale of a group depends on all tokens of the step in
this group. So a program also reads the *mates* of its tokens: the tokens of other programs that go
to the same groups.

The program that writes the lowest slot of a group also stores the scale of the group. If the scale
grows, it first encodes the kept tokens of the group again. No synchronization is needed: other
programs may read the old scale or the new one, because the maximum of either with the scale of the
step's tokens is the same number.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.append_fp8 import (
    Source,
    load_slots,
    load_tokens,
    store_tokens,
)
from paged_mla_optimized.kernels.common.regroup import encode_again
from paged_mla_optimized.kernels.common.scales import GROUPS, largest_of, magnitude_of, scale_of

_NO_SLOT = tl.constexpr(2**63 - 1)  # past every slot


@triton.jit
def _mates(slot, other_slot, SIZE: tl.constexpr):
    """Return bool [TOKENS, N]: whether `slot` and `other_slot` are in the same group.

    A negative slot is in no group.
    """
    same = (slot // SIZE)[:, None] == (other_slot // SIZE)[None, :]
    return same & (slot >= 0)[:, None] & (other_slot >= 0)[None, :]


@triton.jit
def _join(slot, largest, lowest, other_slot, ckv, first, second, SIZE: tl.constexpr):
    """Return `largest` and `lowest` [TOKENS], updated by the mates among other tokens [N].

    `largest` is the largest order (``order_of``) in each token's group, `lowest` the lowest slot.
    """
    mates = _mates(slot, other_slot, SIZE)
    of_ckv, of_k_pe = largest_of(ckv, first, second)  # the two have different layouts
    largest = tl.maximum(largest, tl.max(tl.where(mates, of_ckv[None, :], 0), axis=1))
    largest = tl.maximum(largest, tl.max(tl.where(mates, of_k_pe[None, :], 0), axis=1))
    slots = tl.where(mates, other_slot[None, :], _NO_SLOT)
    return largest, tl.minimum(lowest, tl.min(slots, axis=1))


@triton.jit
def _join_if_mates(
    slot, largest, lowest, source, other, other_slot, SIZE: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Return the result of :func:`_join`; load the tokens `other` [N] only if one is a mate."""
    wanted = tl.max(_mates(slot, other_slot, SIZE).to(tl.int32), axis=0)
    if tl.max(wanted, axis=0) > 0:
        ckv, first, second = load_tokens(source, other, wanted > 0, R, P, ROPE)
        largest, lowest = _join(slot, largest, lowest, other_slot, ckv, first, second, SIZE)
    return largest, lowest


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks", "reserved_slot"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def append_groups_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # uint8 [num_blocks, BLOCK_SIZE, R + P]
    scales_ptr,  # float32 [num_blocks, 1, GROUPS]
    slot_mapping_ptr,  # int64 [T]; no token is written to a slot outside the cache
    positions_ptr,  # int64 [T]
    cos_ptr,  # [max_model_len, P / 2]; read if ROPE is not "none"
    sin_ptr,  # [max_model_len, P / 2]; read if ROPE is not "none"
    stride_ckv,
    stride_k_pe,
    stride_slots,
    stride_cache_block,
    stride_cache_token,
    stride_scales_block,
    num_tokens,
    num_blocks,
    reserved_slot,  # the slot that the kernel never writes; -1 if there is none
    R: tl.constexpr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
    BLOCK_SIZE: tl.constexpr,
    PLANNED: tl.constexpr,  # slots of a plan: mates are less than a group apart in the step
    TOKENS: tl.constexpr,  # tokens of a program
    PLACES: tl.constexpr,  # other tokens, or places of a group, that are processed together
    SLOTS: tl.constexpr,  # slots of the step that are compared together
    NATIVE: tl.constexpr,
):
    SIZE: tl.constexpr = BLOCK_SIZE // GROUPS
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    index = tl.arange(0, TOKENS)
    token = begin + index
    slot = load_slots(
        slot_mapping_ptr, stride_slots, token, token < num_tokens, num_blocks, reserved_slot,
        BLOCK_SIZE,
    )  # fmt: skip
    source = Source(ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe)
    # These loads do not depend on the slots, so they do not wait for them.
    ckv, first, second = load_tokens(source, token, token < num_tokens, R, P, ROPE)
    live = slot >= 0
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = cache_ptr + block * stride_cache_block + place * stride_cache_token
    scale_at = scales_ptr + block * stride_scales_block + place // SIZE
    old = tl.load(scale_at, mask=live, other=0.0)

    largest = tl.zeros([TOKENS], tl.uint32)
    largest, lowest = _join(slot, largest, slot, slot, ckv, first, second, SIZE)
    near = tl.arange(0, PLACES)
    for away in range(0, SIZE - 1, PLACES):
        before, after = begin - 1 - away - near, begin + TOKENS + away + near
        slot_before = load_slots(
            slot_mapping_ptr, stride_slots, before, before >= 0, num_blocks, reserved_slot,
            BLOCK_SIZE,
        )  # fmt: skip
        slot_after = load_slots(
            slot_mapping_ptr, stride_slots, after, after < num_tokens, num_blocks, reserved_slot,
            BLOCK_SIZE,
        )  # fmt: skip
        largest, lowest = _join_if_mates(
            slot, largest, lowest, source, before, slot_before, SIZE, R, P, ROPE
        )
        largest, lowest = _join_if_mates(
            slot, largest, lowest, source, after, slot_after, SIZE, R, P, ROPE
        )
    if not PLANNED:
        top = tl.max(tl.where(live, slot // SIZE, -1), axis=0)
        bottom = tl.min(tl.where(live, slot // SIZE, top), axis=0)
        for start in range(0, num_tokens, SLOTS):
            all_others = start + tl.arange(0, SLOTS).to(tl.int64)
            is_far = (all_others < begin - SIZE + 1) | (all_others >= begin + TOKENS + SIZE - 1)
            other_slot = load_slots(
                slot_mapping_ptr, stride_slots, all_others,
                is_far & (all_others < num_tokens), num_blocks, reserved_slot, BLOCK_SIZE,
            )  # fmt: skip
            of_group = tl.where(other_slot >= 0, other_slot // SIZE, -1)
            possible = (of_group >= bottom) & (of_group <= top) & (of_group >= 0)
            if tl.max(possible.to(tl.int32), axis=0) > 0:
                mates = tl.max(_mates(slot, other_slot, SIZE).to(tl.int32), axis=0) > 0
                one = tl.min(tl.where(mates, all_others, num_tokens), axis=0)
                while one < num_tokens:
                    others = one + near
                    slot_of = load_slots(
                        slot_mapping_ptr, stride_slots, others, others < num_tokens, num_blocks,
                        reserved_slot, BLOCK_SIZE,
                    )  # fmt: skip
                    largest, lowest = _join_if_mates(
                        slot, largest, lowest, source, others, slot_of, SIZE, R, P, ROPE
                    )
                    mates = mates & (all_others >= one + PLACES)
                    one = tl.min(tl.where(mates, all_others, num_tokens), axis=0)

    scale = tl.where(live, scale_of(magnitude_of(largest)), 1.0)
    kept = lowest % SIZE
    keeps = (kept > 0) & (old > 0) & (old < float("inf"))
    scale = tl.where(keeps, tl.maximum(scale, old), scale)
    leads = slot == lowest
    grows = live & leads & keeps & (scale > old)
    tl.debug_barrier()  # all threads have loaded the old scales before one stores new ones
    one = tl.min(tl.where(grows, index, TOKENS), axis=0)
    while one < TOKENS:
        mine = index == one
        group_slot = tl.sum(tl.where(mine, lowest - kept, 0), axis=0)
        num_kept = tl.sum(tl.where(mine, kept, 0), axis=0)
        of_group = tl.sum(tl.where(mine, old, 0.0), axis=0)
        grown = tl.sum(tl.where(mine, scale, 0.0), axis=0)
        group_ptr = cache_ptr + group_slot // BLOCK_SIZE * stride_cache_block
        group_ptr += group_slot % BLOCK_SIZE * stride_cache_token
        encode_again(
            group_ptr, stride_cache_token, num_kept, of_group, grown, R, P, SIZE, PLACES, NATIVE
        )
        one = tl.min(tl.where(grows & (index > one), index, TOKENS), axis=0)
    store_tokens(row, ckv, first, second, scale[:, None], live, R, P, ROPE, NATIVE)
    tl.store(scale_at, scale, mask=live & leads)
