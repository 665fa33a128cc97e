"""Write the tokens of a step as e4m3 into scale groups, at the slots of a plan (S-10 to S-12).

A scale group is the BLOCK_SIZE / GROUPS tokens of a block that share one scale. In a plan the
tokens of a row follow each other both in the step and in their slots, so the tokens of a step in
one group are one run. Program i writes all runs that start in tokens [i * TOKENS, (i + 1) * TOKENS)
of the step, including their later tokens. So one program alone writes each group, and no program
depends on another. If the scale of a group grows, the program encodes the kept tokens of the group
again.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.append_fp8 import (
    Source,
    is_in_cache,
    load_tokens,
    store_tokens,
)
from paged_mla_optimized.kernels.common.regroup import encode_again
from paged_mla_optimized.kernels.common.scales import GROUPS, largest_magnitude, scale_of


@triton.jit
def _largest_of_run(
    source, start, stop, left_out, R: tl.constexpr, P: tl.constexpr, ROPE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the largest finite magnitude of tokens [start, stop) except the token `left_out`.

    There are at most ROWS tokens. The caller loads them again, from L1, because fewer registers are
    needed than for keeping them.
    """
    token = start + tl.arange(0, ROWS)
    live = (token < stop) & (token != left_out)
    ckv, first, second = load_tokens(source, token, live, R, P, ROPE)
    return largest_magnitude(ckv, first, second, live)


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks", "reserved_slot"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def append_runs_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # uint8 [num_blocks, BLOCK_SIZE, R + P]
    scales_ptr,  # float32 [num_blocks, 1, GROUPS]
    slot_mapping_ptr,  # int64 [T] of a plan; no token is written to a slot outside the cache
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
    TOKENS: tl.constexpr,  # tokens of a program
    WINDOW: tl.constexpr,  # tokens whose slots a program reads: its own and those of one more group
    ROWS: tl.constexpr,  # tokens that are encoded together
    ALL_ROWS: tl.constexpr,  # tokens of a group
    NATIVE: tl.constexpr,
):
    SIZE: tl.constexpr = BLOCK_SIZE // GROUPS
    source = Source(ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe)
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    place_of = tl.arange(0, WINDOW)
    token = begin + place_of
    slot_ptr = slot_mapping_ptr + token * stride_slots
    slot = tl.load(slot_ptr, mask=token < num_tokens, other=-1)
    is_behind = (token > 0) & (token <= num_tokens)
    slot_before = tl.load(slot_ptr - stride_slots, mask=is_behind, other=-1)
    # Whether a token is in the group of the token before it, at the next slot.
    goes_on = (slot == slot_before + 1) & (slot % SIZE != 0)
    seams = tl.where(goes_on, WINDOW, place_of)
    is_own = is_in_cache(slot, num_blocks, BLOCK_SIZE) & (place_of < TOKENS)
    begins = tl.where(is_own, seams, WINDOW)
    begin_of_run = tl.min(begins, axis=0)
    while begin_of_run < TOKENS:
        end_of_run = tl.min(tl.where(seams > begin_of_run, seams, WINDOW), axis=0)
        start, stop = begin + begin_of_run, begin + end_of_run
        first_slot = tl.load(slot_mapping_ptr + start * stride_slots)
        left_out = start + reserved_slot - first_slot  # token at the reserved slot, if in the run
        if (stop - start > 1) | (start != left_out):
            block, place = first_slot // BLOCK_SIZE, first_slot % BLOCK_SIZE
            block_ptr = cache_ptr + block * stride_cache_block
            scale_ptr = scales_ptr + block * stride_scales_block + place // SIZE
            old = tl.load(scale_ptr)
            if stop - start > ROWS:
                amax = _largest_of_run(source, start, stop, left_out, R, P, ROPE, ALL_ROWS)
            else:
                amax = _largest_of_run(source, start, stop, left_out, R, P, ROPE, ROWS)
            scale = scale_of(amax)
            kept = place % SIZE + (start == left_out).to(tl.int64)
            keeps = (kept > 0) & (old > 0) & (old < float("inf"))
            scale = tl.where(keeps, tl.maximum(scale, old), scale)
            for first_row in range(start, stop, ROWS):
                row = first_row + tl.arange(0, ROWS)
                live = (row < stop) & (row != left_out)
                ckv, first, second = load_tokens(source, row, live, R, P, ROPE)
                row_ptr = block_ptr + (place + row - start) * stride_cache_token
                store_tokens(row_ptr, ckv, first, second, scale, live, R, P, ROPE, NATIVE)
            tl.debug_barrier()  # all threads have loaded the old scale before one stores the new
            tl.store(scale_ptr, scale)
            if keeps & (scale > old):
                group_ptr = block_ptr + place // SIZE * SIZE * stride_cache_token
                encode_again(
                    group_ptr, stride_cache_token, kept, old, scale, R, P, SIZE, ROWS, NATIVE
                )
        begin_of_run = tl.min(tl.where(begins >= end_of_run, begins, WINDOW), axis=0)
