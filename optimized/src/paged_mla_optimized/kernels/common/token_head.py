"""Records of the tensors that have one line for each token and head.

A line is the last axis of a tensor [T, H, ..] at one token and head. For `lse`, it is one number.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Lines(NamedTuple):
    """A tensor [T, H, ..] whose lines are contiguous."""

    ptr: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor


class Partials(NamedTuple):
    """The buffers of partial results, which the combine kernel joins."""

    out_ptr: tl.tensor  # [tiles, TILE_M, R]
    lse_ptr: tl.tensor  # float32 [tiles, TILE_M]


class Answers(NamedTuple):
    """The buffers of outputs and of partial results."""

    out: Lines  # [T, H, R]
    lse: Lines  # float32 [T, H]
    partial_out_ptr: tl.tensor  # [tiles, TILE_M, R]; None in kernels that write no partials
    partial_lse_ptr: tl.tensor  # float32 [tiles, TILE_M]


@triton.jit
def line_at(lines, token, head):
    """Return the offset, in elements, of the line of a token and head."""
    return token * lines.stride_token + head * lines.stride_head


@triton.jit
def line_ptr(lines, token, head):
    """Return the pointer to the line of a token and head."""
    return lines.ptr + token * lines.stride_token + head * lines.stride_head
