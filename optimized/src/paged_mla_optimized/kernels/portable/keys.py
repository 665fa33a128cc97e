"""Load key tiles of a paged cache in any format, and multiply with them (S-5, S-9, S-11).

The latents of a tile are a tuple of SHARES tensors [TILE_N, R / SHARES], called shares here. If the
rows contain scales, each share is one scale group. 16-bit numbers represent every code exactly. The
kernel multiplies scores and weights by the scales of keys in float32, so that only weights are
rounded.

SCALES specifies where the scales are stored. It has the values of ``MlaConfig.scales``, and is
"none" in formats without scales.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import decode, from_bfloat16_bits
from paged_mla_optimized.kernels.common.scales import has_key_scales, load_row_scale, load_scales
from paged_mla_optimized.triton_compat.interpreter import is_compiled


class Keys(NamedTuple):
    """A paged cache, and the constants that specify its format."""

    cache_ptr: tl.tensor  # [num_blocks, block_size, R + P], or uint8 of the bytes of a row
    stride_block: tl.tensor
    stride_token: tl.tensor
    scales_ptr: tl.tensor  # float32 [] or [num_blocks, 1, G]
    stride_scales: tl.tensor  # stride of a block in the scales
    block_table_ptr: tl.tensor  # int32 [B, M]
    stride_table_row: tl.tensor
    stride_table_col: tl.tensor
    num_blocks: tl.tensor
    block_size: tl.tensor
    R: tl.constexpr
    P: tl.constexpr
    SCALES: tl.constexpr
    SHARES: tl.constexpr
    NATIVE: tl.constexpr
    TILE_N: tl.constexpr
    TILE_IN_BLOCK: tl.constexpr  # block_size % TILE_N == 0


@triton.constexpr_function
def share_width(rank, shares):
    """Return the columns of a share in a tile: at least 16, the minimum of a product."""
    return max(rank // shares, 16)


@triton.jit
def share_columns(share, R: tl.constexpr, SHARES: tl.constexpr):
    """Return the columns of a share, and whether each belongs to it; both [1, share_width]."""
    column = tl.arange(0, share_width(R, SHARES))[None, :]
    return column + share * (R // SHARES), column < R // SHARES


@triton.jit
def load_blocks(keys, table_row_ptr, tile, seq_len):
    """Load the block id of a key tile, or of each of its keys.

    The id is -1 past the end of the row, where the function does not read the table. It is also
    negative for each invalid id.
    """
    key = tile * keys.TILE_N
    if not keys.TILE_IN_BLOCK:
        key += tl.arange(0, keys.TILE_N)
    entry = (key // keys.block_size).to(tl.int64) * keys.stride_table_col
    block = tl.load(table_row_ptr + entry, mask=key < seq_len, other=-1)
    return tl.where(block < keys.num_blocks, block, -1)


@triton.jit
def _decoded(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return the values of a tile of codes; one thread decodes each code."""
    values = decode(codes, DTYPE, NATIVE)
    if is_compiled():
        # The assembly does nothing, but Triton cannot duplicate it. Otherwise Triton would decode
        # in the layouts of both products' operands, in which all warps hold the same values.
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False,
            pack=32 // values.dtype.primitive_bitwidth,
        )  # fmt: skip
    return values


@triton.jit
def load_keys(keys, block, tile, seq_len, DTYPE: tl.constexpr):
    """Load one key tile.

    Returns the shares of ckv, k_pe [TILE_N, P], and a tuple of scales [TILE_N]: one scale for each
    share, one for each key, or none. Keys past the row and keys in no valid block are zeros with
    scales of 1.
    """
    within = tl.arange(0, keys.TILE_N)
    key = tile * keys.TILE_N + within
    exists = (key < seq_len) & (block >= 0)
    if keys.TILE_IN_BLOCK:
        first = (tile * keys.TILE_N % keys.block_size).to(tl.int64)
        base = keys.cache_ptr + block.to(tl.int64) * keys.stride_block + first * keys.stride_token
        offset = within * keys.stride_token  # 32 bits are enough inside one block
    else:
        base = keys.cache_ptr
        offset = block.to(tl.int64) * keys.stride_block
        offset += (key % keys.block_size).to(tl.int64) * keys.stride_token
    ckv, scales = (), ()
    for share in tl.static_range(keys.SHARES):
        column, is_own = share_columns(share, keys.R, keys.SHARES)
        wanted = exists[:, None]
        if share_width(keys.R, keys.SHARES) != keys.R // keys.SHARES:
            wanted &= is_own
        part = tl.load(base + (offset[:, None] + column), mask=wanted, other=0)
        ckv += (part if keys.SCALES == "none" else _decoded(part, DTYPE, keys.NATIVE),)
        if keys.SCALES == "inline":
            scales += (load_row_scale(base + offset, share, exists, keys.R),)
    column = tl.arange(0, keys.P)[None, :]
    if keys.SCALES == "inline":
        k_pe_at = base + (offset + keys.R + 4 * keys.SHARES)
        k_pe_at = k_pe_at.to(tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.load(k_pe_at[:, None] + column, mask=exists[:, None], other=0)
        # float32 represents the bfloat16 numbers exactly if the queries are float16.
        k_pe = from_bfloat16_bits(bits, DTYPE if DTYPE.is_bf16() else tl.float32)
    else:
        k_pe = tl.load(base + keys.R + (offset[:, None] + column), mask=exists[:, None], other=0)
        if keys.SCALES != "none":
            k_pe = _decoded(k_pe, DTYPE, keys.NATIVE)
        if has_key_scales(keys.SCALES):
            place = (key % keys.block_size).to(tl.int64)
            scale = load_scales(
                keys.scales_ptr, block.to(tl.int64), place, keys.stride_scales, keys.block_size,
                exists, keys.SCALES,
            )  # fmt: skip
            scales += (scale,)
    return ckv, k_pe, scales


@triton.jit
def load_shares(row_ptr, live, R: tl.constexpr, SHARES: tl.constexpr):
    """Load the shares of rows [TILE_M, R] at pointers [TILE_M]; rows that are not live are 0."""
    shares = ()
    for share in tl.static_range(SHARES):
        column, is_own = share_columns(share, R, SHARES)
        wanted = live[:, None]
        if share_width(R, SHARES) != R // SHARES:
            wanted &= is_own
        shares += (tl.load(row_ptr[:, None] + column, mask=wanted, other=0.0),)
    return shares


@triton.jit
def store_shares(row_ptr, shares, live, R: tl.constexpr, SHARES: tl.constexpr):
    """Store the shares of live rows [TILE_M, R] at pointers [TILE_M]."""
    for share in tl.static_range(SHARES):
        column, is_own = share_columns(share, R, SHARES)
        wanted = live[:, None]
        if share_width(R, SHARES) != R // SHARES:
            wanted &= is_own
        value = shares[share].to(row_ptr.dtype.element_ty)
        tl.store(row_ptr[:, None] + column, value, mask=wanted)


@triton.jit
def scores_of(
    q_nope, q_pe, ckv, k_pe, scales, scale_log2, SCALES: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Return the scores [TILE_M, TILE_N] of a key tile, in units of log2."""
    factor = scale_log2
    if has_key_scales(SCALES):
        factor *= scales[0][None, :]
    # Each product is scaled before it is added. If the products were summed first, they would form
    # one chain, for which Triton gives every warpgroup all keys of the tile instead of some.
    scores = tl.dot(q_nope[0], tl.trans(ckv[0]), input_precision="ieee") * factor
    for share in tl.static_range(1, SHARES):
        if SCALES == "inline":
            factor = scale_log2 * scales[share][None, :]
        scores += tl.dot(q_nope[share], tl.trans(ckv[share]), input_precision="ieee") * factor
    if SCALES == "inline":
        # tf32 represents float16 and bfloat16 numbers exactly.
        precision: tl.constexpr = "tf32" if q_pe.dtype == tl.float16 else "ieee"
        product = tl.dot(q_pe.to(k_pe.dtype), tl.trans(k_pe), input_precision=precision)
        scores += product * scale_log2
    else:
        scores += tl.dot(q_pe, tl.trans(k_pe), input_precision="ieee") * factor
    return scores


@triton.jit
def weighed(
    acc, weights, ckv, scales, largest, keep, SCALES: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Return the sums `acc` times `keep` [TILE_M], plus the weighted shares of a key tile.

    `weights` include the `largest` scale of each key. The scales of its shares may be smaller.
    """
    sums = ()
    for share in tl.static_range(SHARES):
        mine = weights
        if SCALES == "inline":
            mine *= (scales[share] / largest)[None, :]
        mine = mine.to(ckv[share].dtype)
        rest = acc[share] * keep[:, None]
        sums += (tl.dot(mine, ckv[share], rest, input_precision="ieee"),)
    return sums
