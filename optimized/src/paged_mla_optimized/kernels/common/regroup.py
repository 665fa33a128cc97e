"""Encode the kept tokens of a scale group again when the scale of the group grows (rule S-11)."""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import decode, encode


@triton.jit
def _encode_rows(row_ptr, kept, old, scale, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    """Encode the kept rows of codes [PLACES, COLUMNS] again: from scale `old` to `scale`."""
    at = row_ptr[:, None] + tl.arange(0, COLUMNS)[None, :]
    value = decode(tl.load(at, mask=kept[:, None], other=0), tl.float32, NATIVE) * old
    tl.store(at, encode(tl.div_rn(value, scale), NATIVE), mask=kept[:, None])


@triton.jit
def encode_again(
    group_ptr, stride_token, num_kept, old, scale, R: tl.constexpr, P: tl.constexpr,
    SIZE: tl.constexpr, PLACES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode the first `num_kept` tokens of a group again: from scale `old` to `scale`.

    `group_ptr` points to the first token of the group. A group has SIZE tokens of R + P codes. The
    function processes PLACES tokens at a time.
    """
    for start in range(0, SIZE, PLACES):
        place = start + tl.arange(0, PLACES)
        row_ptr = group_ptr + place.to(tl.int64) * stride_token
        _encode_rows(row_ptr, place < num_kept, old, scale, R, NATIVE)
        _encode_rows(row_ptr + R, place < num_kept, old, scale, P, NATIVE)
