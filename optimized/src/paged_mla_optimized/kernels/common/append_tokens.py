"""Write the tokens of a step as e4m3 to a cache with one scale for each token (S-10 to S-12).

Each program writes TOKENS tokens and their scales. The kernel writes no token whose slot is outside
the cache or equal to `reserved_slot`. No program depends on another.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.append_fp8 import (
    Source,
    load_slots,
    load_tokens,
    store_tokens,
)
from paged_mla_optimized.kernels.common.scales import largest_magnitude, scale_of


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks", "reserved_slot"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def append_tokens_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # uint8 [num_blocks, BLOCK_SIZE, R + P]
    scales_ptr,  # float32 [num_blocks, 1, BLOCK_SIZE]
    slot_mapping_ptr,  # int64 [T]
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
    NATIVE: tl.constexpr,
):
    source = Source(ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe)
    # The tokens are processed one by one, so that each scale is a scalar, which needs no layout
    # conversion. All tokens are loaded before the first one is stored.
    begin = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, 1)
    loaded = ()
    for index in tl.static_range(TOKENS):
        token = begin + index
        is_token = token < num_tokens
        slot = load_slots(
            slot_mapping_ptr, stride_slots, token, is_token, num_blocks, reserved_slot, BLOCK_SIZE
        )
        ckv, first, second = load_tokens(source, token, is_token, R, P, ROPE)
        loaded += ((slot, ckv, first, second),)
    for index in tl.static_range(TOKENS):
        slot, ckv, first, second = loaded[index]
        live = slot >= 0
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        row = cache_ptr + block * stride_cache_block + place * stride_cache_token
        scale = scale_of(largest_magnitude(ckv, first, second, live))
        tl.store(scales_ptr + block * stride_scales_block + place, scale, mask=live)
        store_tokens(row, ckv, first, second, scale, live, R, P, ROPE, NATIVE)
