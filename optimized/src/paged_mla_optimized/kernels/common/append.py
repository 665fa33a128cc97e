"""Write the latents and the rotated keys of a step to a 16-bit or 32-bit cache (S-10, S-12).

Each program writes TOKENS tokens. A cache row has the R components of the latent and then the P
components of the key with position, which the kernel rotates if ROPE is not "none". The kernel
writes no token whose slot is outside the cache or equal to `reserved_slot`.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.rope import copy_rotated


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "reserved_slot"])
def append_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # [num_blocks, block_size, R + P]
    slot_mapping_ptr,  # int64 [T]
    positions_ptr,  # int64 [T]
    cos_ptr,  # [max_model_len, P / 2]; read if ROPE is not "none"
    sin_ptr,  # [max_model_len, P / 2]; read if ROPE is not "none"
    stride_ckv,
    stride_k_pe,
    stride_slots,
    stride_cache_block,
    stride_cache_token,
    num_tokens,
    block_size,
    num_blocks,
    reserved_slot,  # the slot that the kernel never writes; -1 if there is none
    R: tl.constexpr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
    TOKENS: tl.constexpr,  # tokens of a program
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    slot = tl.load(slot_mapping_ptr + token * stride_slots, mask=is_token, other=-1)
    block = slot // block_size
    live = (slot >= 0) & (block < num_blocks) & (slot != reserved_slot)
    position = tl.load(positions_ptr + token, mask=live, other=0)
    row = cache_ptr + block * stride_cache_block
    row += slot % block_size * stride_cache_token

    column = tl.arange(0, R)
    source = ckv_ptr + token[:, None] * stride_ckv + column[None, :]
    ckv = tl.load(source, mask=live[:, None])
    tl.store(row[:, None] + column[None, :], ckv, mask=live[:, None])

    source = k_pe_ptr + token * stride_k_pe
    if ROPE == "none":
        column = tl.arange(0, P)
        k_pe = tl.load(source[:, None] + column[None, :], mask=live[:, None])
        tl.store(row[:, None] + R + column[None, :], k_pe, mask=live[:, None])
    else:
        copy_rotated(source, row + R, position, live, cos_ptr, sin_ptr, P, ROPE)
